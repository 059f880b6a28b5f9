"""What users import stays importable: the names of every package, and what documents and examples ever showed."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "odc_triton": "DeadlineExceeded MinibatchFailed MixedPrecisionPolicy OdcError RankLost RanksDiffer begin_minibatch "
    "end_minibatch full_parameters fully_shard log_probs memory_plan minibatch publish register_fsdp_forward_method "
    "replace_layers verify",
    "odc_triton.balance": "BALANCES CostModel MinibatchSampler PackedDataset QueuedPacks assign assign_one "
    "balanced_partition best_fit_decreasing count_target_tokens global_packing karmarkar_karp lb_micro lb_mini "
    "local_sort pack pack_collate queue_packs refine store_counter to_device",
    "odc_triton.checkpoint": "load_causal_lm load_pretrained_shards meta_causal_lm save_pretrained with_adapter",
    "odc_triton.hf": "ODCTrainer PackingUnsupported enable_packing model_inputs packed_attention packed_mask "
    "summed_loss",
    "odc_triton.nn": "Attention Embedding LMHead Linear",
    "odc_triton.optim": "Muon Together",
    "odc_triton.sharding": "fully_shard memory_plan",
    "odc_triton.simulate": "DEVICES Job Links MODELS Model Outcome SETTINGS SequenceTime draw from_measured "
    "lengths_of_file named_lengths rank_settings simulate",
}
# By the names that modules had, or have, in documents and examples.
SHOWN = {
    "odc_triton.balance.collate": "IGNORED count_target_tokens pack_collate to_device",
    "odc_triton.doctor": "draw_matrix examine main",
    "odc_triton.footprint": "SCHEMES memory_plan side_by_side",
    "odc_triton.options": "add_arguments read_options",
    "odc_triton.train.options": "SftOptions",
    "odc_triton.train.sft": "train_sft",
    "odc_triton.train.tokenizer": "save_tokenizer train_tokenizer",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names_of_packages(module: str) -> None:
    package = importlib.import_module(module)
    assert set(package.__all__) >= set(PUBLIC[module].split())
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018


@pytest.mark.parametrize("module", SHOWN)
def test_what_was_shown(module: str) -> None:
    for name in SHOWN[module].split():
        assert getattr(importlib.import_module(module), name) is not None


def test_a_former_name_is_the_same_module() -> None:
    import odc_triton.train.options
    from odc_triton.train import sft_options

    assert odc_triton.train.options is sft_options
    assert sft_options.__spec__.name == sft_options.__name__ == "odc_triton.train.sft_options"


@pytest.mark.parametrize("module", ["odc_triton.cli", "odc_triton.train.sft"])
def test_modules_that_are_run(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
