"""What users import stays importable: the names of every package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "odc_triton": "CheckpointCorrupt CheckpointDiffers CheckpointFailed DeadlineExceeded FusedLogits MemoryPlan "
    "MinibatchFailed MixedPrecisionPolicy OdcError PolicyOffer PolicyReader RankLost RanksDiffer Replaced "
    "RolloutFailed TokenLogProbs Verified begin_minibatch end_minibatch full_parameters fully_shard log_probs "
    "memory_plan minibatch publish register_fsdp_forward_method replace_layers verify",
    "odc_triton.balance": "BALANCES CostModel Limits MinibatchSampler PackedDataset Segment Plan QueuedPacks Samples "
    "TowerCost assign assign_one balanced_partition best_fit_decreasing count_target_tokens find_relatives floor_of "
    "make_plan pack pack_collate queue_packs refine store_counter to_device values_of",
    "odc_triton.checkpoint": "load_causal_lm load_pretrained_shards meta_causal_lm save_pretrained with_adapter",
    "odc_triton.data": "load_tokenizer to_transformers train_tokenizer",
    "odc_triton.hf": "ODCTrainer PackingUnsupported enable_packing model_inputs packed_attention packed_mask "
    "summed_loss",
    "odc_triton.nn": "Attention Embedding LMHead Linear",
    "odc_triton.objectives": "CrossEntropy Distillation ORPO Objective SampleSums StepPart StepReport Sums Teacher "
    "Terms evaluate predictions run_step",
    "odc_triton.optim": "AdamW8bit ChainedOptimizer Muon",
    "odc_triton.sharding": "fully_shard memory_plan",
    "odc_triton.simulate": "DEVICES Job Links MODELS Model Outcome SETTINGS draw "
    "lengths_of_file named_lengths rank_settings simulate",
}


def test_from_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
        for file in (ROOT / "odc_triton").rglob("*.py*"):
            archive.write(file, file.relative_to(ROOT))
    program = "import odc_triton.balance as of; print(of.CostModel.__name__, of.__file__)"
    words = [sys.executable, "-S", "-c", program]
    numpy = str(Path(importlib.util.find_spec("numpy").origin).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "packages.zip"), numpy])}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.startswith(f"CostModel {tmp_path}"), done.stderr


@pytest.mark.parametrize("module", PUBLIC)
def test_names_of_packages(module: str) -> None:
    package = importlib.import_module(module)
    assert set(package.__all__) >= set(PUBLIC[module].split())
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018
