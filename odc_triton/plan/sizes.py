"""Sizes that a transformers config gives. Pure."""

from __future__ import annotations


def size_of(config: object, *names: str, default: int | None = None) -> int:
    """The first of these attributes that it has. Raises ValueError naming one that is missing or not positive."""
    name = next((name for name in names if getattr(config, name, None) is not None), names[-1])
    value = getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the model's config has {name}={value!r}, which its cost depends on: give a config that "
            "sets it (of a model of several parts its text_config), or CostModel its coefficients"
        )
    return value
