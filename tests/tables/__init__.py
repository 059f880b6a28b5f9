"""Tests whose outcomes are tables of the documentation."""

from tests.support.table_composes import COMPOSES
from tests.support.table_models import MODELS

TABLES = (MODELS, COMPOSES)
