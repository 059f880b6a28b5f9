"""Sizes that a transformers config gives. Pure."""

from __future__ import annotations

from typing import Any


def size_of(config: object, *names: str, default: int | None = None) -> int:
    """The first of these attributes that it has; the mean where layers differ in it, as in Gemma 3n and Gemma 4. Raises
    ValueError naming one that is missing or not positive.
    """
    name = next((name for name in names if _value(config, name) is not None), names[-1])
    value = _value(config, name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the model's config has {name}={value!r}, which its cost depends on: give a config that "
            "sets it (of a model of several parts its text_config), or CostModel its coefficients"
        )
    return value


def _value(config: Any, name: str) -> Any:
    if name in (getattr(config, "per_layer_attributes", None) or ()):  # transformers' `config.name` then raises
        value = [getattr(each, name) for each in config.per_layer_config]
    else:
        value = getattr(config, name, None)
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return round(sum(value) / len(value))
    return value
