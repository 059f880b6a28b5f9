"""ODCDPOTrainer on real ranks, against TRL's own DPOTrainer on one process with the same pairs."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import dpo_case as case
from tests.support import ranks, slow
from tests.support.families import causal_lm, with_lora
from tests.support.trl_case import assert_alike

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL and PEFT use attributes that transformers has renamed
]

WITH_SFT = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
# Runs of one launch of ranks, by what they show; those after the first are slow.
GROUPS: dict[str, list[dict[str, Any]]] = {
    "usual": [WITH_SFT | {"max_steps": 2}],
    "losses": [
        *({"loss_type": [name]} for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")),
        *({"loss_type": [name]} for name in ("apo_down", "discopop", "sft")),
        {"loss_type": ["sigmoid_norm"], "learning_rate": 0.5},
        *({"loss_type": [name], "label_smoothing": 0.1} for name in ("exo_pair", "robust")),
        {"loss_type": ["discopop", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ],
    "weights and divergences": [
        {"use_weighting": True},
        {"ld_alpha": 0.5},
        {"f_divergence_type": "forward_kl"},
        {"f_divergence_type": "js_divergence", "loss_type": ["ipo"]},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
        {"pad_to_multiple_of": 8, "gradient_checkpointing": False},
    ],
    "references": [
        {"lora": "new", "learning_rate": 0.5},
        {"lora": "ref", "learning_rate": 0.5} | WITH_SFT,
        {"other": True},
        {"other": True, "precompute_ref_log_probs": True, "ld_alpha": 0.5},
        {"precompute_ref_log_probs": True},
        {"lora": "ref", "precompute_ref_log_probs": True, "learning_rate": 0.5},
        {"columns": True},
    ],
    "packs": [
        {"share_prefixes": "off"} | WITH_SFT,
        {"max_length": 58},
        {"max_length": 58, "truncation_mode": "keep_end"},
        {"fused": True} | WITH_SFT,
        {"exact": True} | WITH_SFT,
        {"evals": True},
        {"gradient_accumulation_steps": 3, "loss_type": ["ipo"], "per_device_train_batch_size": 2},
        {"dataloader_num_workers": 1},
    ],
    "bf16": [{"bf16": True}],  # accelerate has one such choice per process
}
_OURS = ("share_prefixes", "fused", "exact", "columns", "dataloader_num_workers")
_NOT_FUSED = ("logits/chosen", "logits/rejected", "mean_token_accuracy")


def _folders(tmp_path: Path) -> list[str]:
    """Of two models."""
    for seed in (0, 5):
        torch.manual_seed(seed)
        causal_lm("Qwen2").save_pretrained(tmp_path / f"model-{seed}")
    return [str(tmp_path / f"model-{seed}") for seed in (0, 5)]


def _each(rank: int, world: int, run: Any, folder: str, models: list[str], group: str) -> list[dict[str, Any]]:
    """Of each run of the group what `run` found: TRL's own trainer, or ours."""
    found = []
    for index, changes in enumerate(GROUPS[group]):
        given = {name: value for name, value in changes.items() if run is case.odc_run or name not in _OURS}
        if "other" in changes:
            given["other"] = models[1]
        if "columns" in given:
            given["columns"] = _columns(models[1])
        elif "columns" in changes:
            given["other"] = models[1]
        if run is case.odc_run and "per_device_train_batch_size" in given:
            given["per_device_train_batch_size"] //= world
        found.append(run(rank, world, f"{folder}/{run.__name__}-{index}", models[0], given))
    return found


def _columns(start: str) -> dict[str, list[float]]:
    """Log-probabilities of each pair's completions, by plain transformers."""
    model, tokens = case.model_of(start).eval(), case.tokenizer()
    columns: dict[str, list[float]] = {"ref_chosen_logps": [], "ref_rejected_logps": []}
    for index in range(case.PAIRS):
        pair = case.pair(index)
        for name in ("chosen", "rejected"):
            ids = torch.tensor([tokens(pair["prompt"] + pair[name] + "<end>")["input_ids"]])
            first = len(tokens(pair["prompt"])["input_ids"])
            with torch.no_grad():
                every = model(ids).logits[0, :-1].log_softmax(-1)
            logps = every.gather(-1, ids[0, 1:, None])[first - 1 :]
            columns[f"ref_{name}_logps"].append(float(logps.sum()))
    return columns


@pytest.mark.parametrize(
    ("group", "world"),
    [("usual", 2), slow("usual", 1), slow("usual", 3), *(slow(group, 2) for group in GROUPS if group != "usual")],
)
def test_as_trl(tmp_path: Path, group: str, world: int) -> None:
    models = _folders(tmp_path)
    (plain,) = ranks.run(_each, 1, case.plain_run, str(tmp_path), models, group)
    ours = ranks.run(_each, world, case.odc_run, str(tmp_path), models, group)
    for changes, of_trl, *of_ranks in zip(GROUPS[group], plain, *ours, strict=True):
        skipped = _NOT_FUSED if "fused" in changes else ()
        if "gradient_accumulation_steps" in changes:  # then TRL's are means of batches
            skipped = ("entropy", *_NOT_FUSED)
        if "bf16" in changes:  # pairs of nearly the same rewards
            skipped = ("rewards/accuracies", "eval_rewards/accuracies")
        if "fused" in changes:
            assert not any(set(_NOT_FUSED) & entry.keys() for result in of_ranks for entry in result["logs"])
        for entry in (*of_trl["logs"], *(entry for result in of_ranks for entry in result["logs"])):
            for name in skipped:
                entry.pop(name, None)
        assert_alike(of_ranks, of_trl, tolerance=5e-2 if "bf16" in changes else 1e-5)
        no_reference = {"lora", "columns", "precompute_ref_log_probs"} & changes.keys() and "other" not in changes
        assert all(result["reference"] is not bool(no_reference) for result in of_ranks)
    if group == "packs":
        apart, shared = (sum(result[at]["computed"] for result in ours) for at in (0, 3))
        assert shared < 0.75 * apart
        assert max(abs(entry["loss"]) for entry in of_trl["logs"] if "loss" in entry) > 1e-3


# ------------------------------------------------------------------ checkpoints


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}


def _saved(rank: int, world: int, folder: str, start: str, resumed: bool) -> dict[str, Any]:
    checkpoint = f"{folder}/whole/checkpoint-2" if resumed else None
    changes = SAVING | WITH_SFT
    result = case.odc_run(rank, world, f"{folder}/{'resumed' if resumed else 'whole'}", start, changes, checkpoint)
    return {name: result[name] for name in ("logs", "weights")}


@pytest.mark.slow
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    """And the last checkpoint is a model of plain transformers."""
    from transformers import AutoModelForCausalLM

    start, _ = _folders(tmp_path)
    whole = ranks.run(_saved, 2, str(tmp_path), start, False)[0]
    resumed = ranks.run(_saved, 3, str(tmp_path), start, True)[0]
    for got, want in zip(resumed["logs"][:-1], whole["logs"][:-1], strict=True):
        for name in want.keys() & {"step", "loss", "rewards/margins", "eval_loss", "eval_rewards/chosen"}:
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    for name, value in model.named_parameters():
        torch.testing.assert_close(resumed["weights"][name], value, rtol=1e-5, atol=1e-6)


def _killed(rank: int, world: int, folder: str, start: str) -> None:
    trainer = case.odc_trainer(folder, world, start)
    mean_loss_of = trainer._mean_loss_of

    def dies(*args: Any) -> torch.Tensor:
        if rank == 1 and trainer.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_loss_of(*args)

    trainer._mean_loss_of = dies
    trainer.train()


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    start, _ = _folders(tmp_path)
    with ranks.start(_killed, 2, str(tmp_path / "out"), start) as job:
        first, second = job.join()
    assert second.signal == signal.SIGKILL
    assert (first.error_type, "rank 1 died" in first.error) == ("RankLost", True), first.error


# ------------------------------------------------------------------ what is refused


REFUSED = [
    ({"loss_type": ["aot"]}, "DPOConfig has loss_type 'aot', which sorts a batch"),
    ({"loss_type": ["sigmoid", "aot_unpaired"]}, "loss_type 'aot_unpaired'"),
    ({"sync_ref_model": True}, "sync_ref_model=True: it would write into the reference's shards"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: TRL's loss has no targets to smooth"),
    ({"activation_offloading": True}, "activation_offloading=True: TRL's step is not run"),
    (
        {},
        "there is no ref_model, and the reference model is loaded from the model's folder or hub id, which is unknown",
    ),
    ({"share_prefixes": "on"}, "share_prefixes is 'on': give 'auto' or 'off'"),
    ({"compute_metrics": print}, "compute_metrics is given, and packs have no logits"),
    ({"peft_config": object()}, "peft_config is given, but the model is sharded already"),
]


def _refusals(rank: int, world: int, folder: str) -> None:
    import trl
    from transformers import TrainingArguments

    from odc_triton import MinibatchFailed, fully_shard
    from odc_triton.hf import ODCDPOTrainer, enable_packing

    case.environment()
    given = {"train_dataset": case.dataset([0, 1]), "processing_class": case.tokenizer()}
    model, args = case.sharded(None), case.arguments(folder, eval_strategy="no")
    for changes, words in REFUSED:
        own = {name: value for name, value in changes.items() if not hasattr(args, name)}
        taken = case.arguments(folder, eval_strategy="no", **{name: changes[name] for name in changes.keys() - own})
        with pytest.raises(ValueError, match=re.escape(words)):
            ODCDPOTrainer(model, args=taken, **given | own)
    unpacked = fully_shard(case.model_of(None))
    images = case.dataset([0, 1], image=["a", "b"])
    for wrong, options, words in (
        (model, {"args": None}, r"args is a NoneType; give a trl\.DPOConfig"),
        (model, {"args": TrainingArguments(folder, use_cpu=True)}, "args is a TrainingArguments"),
        (case.model_of(None), {}, "Qwen2ForCausalLM is not sharded"),
        (unpacked, {"ref_model": case.sharded(None)}, "the model's attention does not keep a pack's documents apart"),
        (model, {"ref_model": unpacked}, "ref_model's attention does not keep a pack's documents apart"),
        (model, {"ref_model": case.model_of(None)}, "ref_model is not sharded: call enable_packing and fully_shard"),
        (model, {"ref_model": model}, "ref_model is the model itself"),
        (model, {"train_dataset": images}, "contains 'image' or 'images' keys"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            ODCDPOTrainer(wrong, **{"args": args} | given | options)
    assert not args.precompute_ref_log_probs
    for name in ("eval_dataset", "train_dataset"):
        stream = case.dataset([0, 1]).to_iterable_dataset()
        with pytest.raises(TypeError, match="IterableDataset"):
            ODCDPOTrainer(model, case.sharded(None), args, **given | {name: stream}).evaluate()
    adapted = with_lora(case.model_of(None))
    enable_packing(adapted)
    with pytest.warns(UserWarning, match="the adapters are trained already, and the reference is the model without"):
        ODCDPOTrainer(fully_shard(adapted), args=args, **given)
    fused = case.sharded(None, fused=True)
    weighted = case.arguments(folder, use_weighting=True, eval_strategy="no")
    with pytest.raises(MinibatchFailed, match="use_weighting needs all probabilities"):
        ODCDPOTrainer(fused, case.sharded(None), weighted, **given).train()
    trl.__version__ = "1.17.0"
    with pytest.raises(ImportError, match=r"ODCDPOTrainer is written for TRL 1.16.\*, and 1.17.0 is here"):
        ODCDPOTrainer(model, args=args, **given)


@pytest.mark.slow
def test_refused(tmp_path: Path) -> None:
    ranks.run(_refusals, 1, str(tmp_path))
