"""Six ways to train models with images have the same gradient."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.harness import Measured, Work, compare
from bench.suites import images
from bench.suites.images import (
    Fsdp2Dummies,
    Fsdp2DummiesNoReshard,
    Fsdp2Unbalanced,
    ImageWork,
    OdcByText,
    OdcUnbalanced,
)
from bench.variants import Odc
from tests.support import ranks

KINDS = (Fsdp2Dummies, Fsdp2DummiesNoReshard, OdcByText, Odc, Fsdp2Unbalanced, OdcUnbalanced)
SIZES = [(30, ()), (9, ("4x8", "8x8")), (40, ()), (12, ("6x4",)), (25, ()), (70, ()), (33, ()), (10, ())]


@pytest.fixture
def small(tmp_path: Path) -> ImageWork:
    """A minibatch of one sample a rank, and one of three."""
    text = images.CONFIG["text_config"] | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 48}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 2, 4]}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    tower = images.CONFIG["vision_config"] | tower | {"fullatt_block_indexes": [1]}
    config = images.CONFIG | {"text_config": text, "vision_config": tower}
    (tmp_path / "sizes.json").write_text(json.dumps({"minibatches": [SIZES]}))
    drawn = [[0, 1], [2, 3, 4, 5, 6, 7]]
    return ImageWork(dataset=str(tmp_path / "sizes.json"), config=config, minibatches=drawn, token_cap=95)


def compared(rank: int, world: int, work: Work, caps: tuple[int, ...]) -> list[Measured]:
    return compare(KINDS, work, caps=caps, most_apart=images.MOST_APART)


@pytest.mark.slow  # the suite checks it too
def test_all_ways_have_the_same_gradient(small: ImageWork) -> None:
    results = ranks.run(compared, 2, small, (95,) * len(KINDS))[0]
    assert 0 < max(each.apart for each in results) <= images.MOST_APART
    losses = np.array([each.losses for each in results])
    assert losses == pytest.approx(losses[:1].repeat(len(KINDS), 0), rel=1e-4)
