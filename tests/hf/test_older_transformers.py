"""What needs a newer transformers than the package says so, with both versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from odc_triton.base import environment
from odc_triton.checkpoint.pretrained_adapter import Merge
from odc_triton.hf import PackingUnsupported, enable_packing
from odc_triton.jobs.data.records import DataError, Record
from odc_triton.jobs.train.vision import load_processor, require_processor
from tests.sharding.test_footprint import hybrid
from tests.support.families import causal_lm
from tests.support.sft_case import case, write_case
from tests.support.vision import FAMILIES


def _merge() -> None:
    Merge(causal_lm("Llama"), Path("adapter"), "base")


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "recurrent layers": (
        lambda: enable_packing(hybrid("Qwen3_5")),
        r"Qwen3_5GatedDeltaNet needs transformers 5.17, and 5.5.4 is installed\. odc-triton's commands",
    ),
    "images that see themselves": (
        lambda: enable_packing(FAMILIES["gemma3"].make()),
        r"Gemma3ForConditionalGeneration needs transformers 5.6, and 5.5.4 is installed\. odc-triton's commands",
    ),
    "chosen keys": (
        lambda: enable_packing(causal_lm("GlmMoeDsa")),
        r"GlmMoeDsaForCausalLM \(glm_moe_dsa\), whose indexer chooses keys, needs transformers 5.20, and 5.5.4 is inst",
    ),
    "adapters": (_merge, r"can't be loaded \(merging needs transformers 5.7, and 5.5.4 is installed\): give base"),
}


@pytest.mark.parametrize("what", CASES)
def test_what_an_older_one_lacks_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, said = CASES[what]
    monkeypatch.setattr(environment, "version", {"transformers": "5.5.4"}.__getitem__)
    with pytest.raises((PackingUnsupported, ValueError), match=said):
        tried()


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the version itself is not older."""
    for found, is_older in {"5.9.0": True, "5.10.0": False, "5.10.0.dev0": False, "6.0": False}.items():
        monkeypatch.setattr(environment, "version", {"transformers": found}.__getitem__)
        assert bool(environment.needs_transformers("5.10")) == is_older, found


def test_text_is_learned_and_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["qwen2_5_vl"].make().config.save_pretrained(write_case(tmp_path))
    (tmp_path / "processor_config.json").write_text("{}")
    options = case(tmp_path, model=str(tmp_path), init=None, tokenizer=None)
    monkeypatch.setattr(environment, "version", {"transformers": "5.5.4"}.__getitem__)
    assert load_processor(options) is None
    said = "line 1 has images, and reading them needs transformers 5.23, and 5.5.4 is installed: install that, or leave"
    with pytest.raises(DataError, match=said):
        require_processor(options, [Record(form="text", images=("a.png",), where="line 1", characters=1)])
