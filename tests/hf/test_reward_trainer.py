"""ODCRewardTrainer on real ranks, against TRL's own RewardTrainer on one process with the same pairs."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import dpo_case as case
from tests.support import ranks, slow
from tests.support.families import FAMILIES, causal_lm
from tests.support.trl_case import assert_alike

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL uses attributes that transformers has renamed
]

LR = {"learning_rate": 0.5}
# Runs of one launch of ranks, by what they show; those after the first are slow.
GROUPS: dict[str, list[dict[str, Any]]] = {
    "usual": [LR | {"center_rewards_coefficient": 0.01, "max_steps": 2}],
    "others": [
        LR | {"margins": True},
        LR | {"share_prefixes": "off"},
        LR | {"pad_token": "<end>", "pad_to_multiple_of": 8},  # TRL scores the token before it
        LR | {"exact": True, "gradient_checkpointing": False, "evals": True},
        LR | {"family": "Llama"},
        LR | {"lora": True},
        LR | {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    ],
    "simulated": [LR | {"backend": "cpu-sharded"}],  # gathers weights only during a forward
    "bf16": [LR | {"bf16": True}],
}
_OURS = ("share_prefixes", "exact", "backend")


def _folder(tmp_path: Path, family: str = "Qwen2") -> str:
    """Of a classifier."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = causal_lm(family).config
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / family)
    return str(tmp_path / family)


def _model(folder: str, lora: bool = False) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    if lora:
        torch.manual_seed(1)
        options = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["score"], "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, **options))
    return model


def _trainer(rank: int, world: int, folder: str, models: str, ours: bool, **changes: Any) -> Any:
    from trl import RewardTrainer

    from odc_triton import fully_shard
    from odc_triton.hf import ODCRewardTrainer, enable_packing
    from tests.support import simulated  # noqa: F401 the backend

    case.environment()
    own = {name: changes.pop(name) for name in _OURS if name in changes}
    model = _model(f"{models}/{changes.pop('family', 'Qwen2')}", changes.pop("lora", False))
    margins, evals = changes.pop("margins", False), changes.pop("evals", False)
    data = {"train": case.dataset([*range(case.PAIRS)] if ours else case.in_order()), "eval": case.dataset([*range(9)])}
    if margins:
        for name, each in data.items():
            values = [len(chosen) % 5 / 4 for chosen in each["chosen"]]
            data[name] = each.add_column("margin", values)
    if evals:
        data["eval"] = {"a": data["eval"], "b": data["eval"].select(range(4))}
    if ours:
        enable_packing(model)
        model = fully_shard(model, **{name: own.pop(name) for name in ("exact", "backend") if name in own})
        changes = {"rows": case.ROWS // world} | changes
    else:
        changes["train_sampling_strategy"] = "sequential"
    args = case.arguments(folder, kind="RewardConfig", **changes)
    kind = ODCRewardTrainer if ours else RewardTrainer
    given = {"train_dataset": data["train"], "eval_dataset": data["eval"], "processing_class": case.tokenizer()}
    return kind(model, args, **given, **own if ours else {})


def _run(
    rank: int, world: int, folder: str, models: str, ours: bool, changes: dict[str, Any], resume: str | None = None
) -> dict[str, Any]:
    from odc_triton import full_parameters

    trainer = _trainer(rank, world, folder, models, ours, **changes)
    computed: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=resume)
    named = full_parameters(trainer.model) if ours else trainer.model.named_parameters()
    weights = {name: value.detach().clone() for name, value in named}
    found = {"logs": case.logs_of(trainer), "weights": weights, "computed": sum(computed)}
    return found if ours else found | {"start": start}


def _each(rank: int, world: int, folder: str, models: str, ours: bool, group: str) -> list[dict[str, Any]]:
    found = []
    for index, changes in enumerate(GROUPS[group]):
        given = {name: value for name, value in changes.items() if ours or name not in _OURS}
        if ours and "per_device_train_batch_size" in given:
            given["per_device_train_batch_size"] //= world
        found.append(_run(rank, world, f"{folder}/{ours}-{index}", models, ours, given))
    return found


@pytest.mark.parametrize(
    ("group", "world"),
    [("usual", 2), slow("usual", 1), slow("usual", 3), *(slow(group, 2) for group in GROUPS if group != "usual")],
)
def test_as_trl(tmp_path: Path, group: str, world: int) -> None:
    for family in ("Qwen2", *(["Llama"] if group == "others" else [])):
        _folder(tmp_path, family)
    (plain,) = ranks.run(_each, 1, str(tmp_path), str(tmp_path), False, group)
    ours = ranks.run(_each, world, str(tmp_path), str(tmp_path), True, group)
    for changes, of_trl, *of_ranks in zip(GROUPS[group], plain, *ours, strict=True):
        skipped = ("min_reward", "max_reward") if "gradient_accumulation_steps" in changes else ()  # of batches
        skipped += ("accuracy", "eval_accuracy") if "bf16" in changes else ()  # pairs of nearly the same rewards
        for entry in (*of_trl["logs"], *(entry for result in of_ranks for entry in result["logs"])):
            for name in skipped:
                entry.pop(name, None)
        assert_alike(of_ranks, of_trl, tolerance=5e-2 if "bf16" in changes else 1e-5)
        assert {"min_reward", "mean_reward", "accuracy", "margin"} & of_trl["logs"][0].keys()
    if group == "others":
        shared, apart = (sum(result[at]["computed"] for result in ours) for at in (0, 1))
        assert shared < 0.75 * apart


# ------------------------------------------------------------------ checkpoints


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}


def _saved(rank: int, world: int, folder: str, resumed: bool) -> dict[str, Any]:
    checkpoint = f"{folder}/whole/checkpoint-2" if resumed else None
    return _run(rank, world, f"{folder}/{'resumed' if resumed else 'whole'}", folder, True, dict(SAVING), checkpoint)


@pytest.mark.slow
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    """And the last checkpoint is a model of plain transformers."""
    from transformers import AutoModelForSequenceClassification

    _folder(tmp_path)
    whole = ranks.run(_saved, 2, str(tmp_path), False)[0]
    resumed = ranks.run(_saved, 3, str(tmp_path), True)[0]
    for got, want in zip(resumed["logs"][:-1], whole["logs"][:-1], strict=True):
        for name in want.keys() & {"step", "loss", "margin", "max_reward", "eval_loss", "eval_margin"}:
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    assert model.config.num_labels == 1
    for name, value in model.named_parameters():
        torch.testing.assert_close(resumed["weights"][name], value, rtol=1e-5, atol=1e-6)


def _killed(rank: int, world: int, folder: str) -> None:
    trainer = _trainer(rank, world, f"{folder}/out", folder, True)
    mean_loss_of = trainer._mean_loss_of

    def dies(*args: Any) -> torch.Tensor:
        if rank == 1 and trainer.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_loss_of(*args)

    trainer._mean_loss_of = dies
    trainer.train()


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    _folder(tmp_path)
    with ranks.start(_killed, 2, str(tmp_path)) as job:
        first, second = job.join()
    assert second.signal == signal.SIGKILL
    assert (first.error_type, "rank 1 died" in first.error) == ("RankLost", True), first.error


# ------------------------------------------------------------------ packing, and what is refused


FAMILIES_OF_CLASSIFIERS = ("Llama", "Mistral", "Qwen3", "Gemma2")


@pytest.mark.parametrize("family", [slow(family) for family in FAMILIES_OF_CLASSIFIERS if family in FAMILIES])
def test_packed_classifiers(tmp_path: Path, family: str) -> None:
    """Scores of any tokens are those of rows that end there; without `logits_to_keep` the forward is as it was."""
    from odc_triton.hf import enable_packing

    folder = _folder(tmp_path, family)
    plain, packed = _model(folder).eval(), _model(folder).eval()
    enable_packing(packed)
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = packed(input_ids=ids, position_ids=positions, logits_to_keep=torch.tensor([3, 6])).logits
    want = torch.cat([plain(input_ids=ids[:, :4]).logits, plain(input_ids=ids[:, 4:7]).logits])
    torch.testing.assert_close(found, want[None])
    torch.testing.assert_close(packed(input_ids=ids).logits, plain(input_ids=ids).logits)


REFUSED = [
    ({"chat_template_path": "other"}, "chat_template_path='other': it may add tokens to a model"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: TRL's loss has no targets to smooth"),
    ({"activation_offloading": True}, "activation_offloading=True: TRL's step is not run"),
    ({"share_prefixes": "on"}, "share_prefixes is 'on': give 'auto' or 'off'"),
    ({"compute_metrics": print}, "compute_metrics is given, and packs have no logits"),
]


def _refusals(rank: int, world: int, folder: str) -> None:
    from odc_triton import fully_shard
    from odc_triton.hf import ODCRewardTrainer, enable_packing

    case.environment()
    given = {"train_dataset": case.dataset([0, 1]), "processing_class": case.tokenizer()}

    def arguments(**changes: Any) -> Any:
        return case.arguments(f"{folder}/out", kind="RewardConfig", eval_strategy="no", **changes)

    plain, args = _model(f"{folder}/Qwen2"), arguments()
    enable_packing(plain)
    model = fully_shard(plain)
    for changes, words in REFUSED:
        own = {name: value for name, value in changes.items() if not hasattr(args, name)}
        taken = arguments(**{name: changes[name] for name in changes.keys() - own})
        with pytest.raises(ValueError, match=re.escape(words)):
            ODCRewardTrainer(model, taken, **given | own)
    language = case.sharded(None)
    language.config.num_labels = 1
    stream = given["train_dataset"].to_iterable_dataset()
    for wrong, options, words in (
        (model, {"args": case.arguments(f"{folder}/dpo")}, r"args is a DPOConfig; give a trl\.RewardConfig"),
        (_model(f"{folder}/Qwen2"), {}, "Qwen2ForSequenceClassification is not sharded"),
        (fully_shard(_model(f"{folder}/Qwen2")), {}, "the model's attention does not keep a pack's documents apart"),
        (language, {}, "has no scores of single tokens: give a model of AutoModelForSequenceClassification"),
        (model, {"train_dataset": stream, "args": arguments(max_steps=1)}, "train_dataset is an IterableDataset"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            ODCRewardTrainer(wrong, **{"args": args} | given | options)


@pytest.mark.slow
def test_refused(tmp_path: Path) -> None:
    _folder(tmp_path)
    ranks.run(_refusals, 1, str(tmp_path))
