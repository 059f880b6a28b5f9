"""When `enable_packing` switches torch to FlashAttention-3: the GPU and the package are pretended, not the switch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl

from odc_triton import hf
from tests.hf.test_attention import build


class Handle:
    def remove(self) -> None:
        pass


def broken() -> Handle:
    raise ImportError("undefined symbol")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    find = importlib.util.find_spec

    def apply(*, installed: bool = True, capability: tuple[int, int] = (9, 0), register: Callable = Handle) -> None:
        spec = importlib.machinery.ModuleSpec("flash_attn_interface", None) if installed else None
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: spec if name == "flash_attn_interface" else find(name, *rest),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)

    yield apply
    restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize(
    ("given", "dropout", "chosen"),
    [
        ({}, 0.0, "FA3"),
        ({"installed": False}, 0.0, None),
        ({"capability": (8, 0)}, 0.0, None),
        ({"capability": (10, 0)}, 0.0, None),
        ({}, 0.1, None),
    ],
    ids=["installed", "not installed", "sm_80", "sm_100", "dropout"],
)
def test_when_it_is_chosen(pretend: Callable, given: dict, dropout: float, chosen: str | None) -> None:
    model = build("Qwen2")
    model.config.attention_dropout = dropout
    pretend(**given)
    hf.enable_packing(model)
    assert current_flash_attention_impl() == chosen


def test_a_choice_that_was_made_stays_and_a_broken_package_is_a_warning(
    pretend: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(register=broken)
    with pytest.warns(UserWarning, match="not used, as torch raised ImportError"):
        hf.enable_packing(build("Qwen2"))
    assert current_flash_attention_impl() is None
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "own", Handle)
    torch.nn.attention.activate_flash_attention_impl("own")
    hf.enable_packing(build("Qwen2"))
    assert current_flash_attention_impl() == "own"
