"""ODCDPOTrainer and ODCRewardTrainer on real ranks, against TRL's own on one process with the same pairs."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import pair_case as case
from tests.support import ranks, slow
from tests.support.families import causal_lm, with_lora
from tests.support.models import tie_in_config
from tests.support.sampling import log_probabilities
from tests.support.trl_case import assert_alike, environment, model_of, tokenizer

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL and PEFT use attributes that transformers has renamed
]

WITH_SFT = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
FAST = {"learning_rate": 0.5}
Run = tuple[str, dict[str, Any]]  # a trainer, and what its arguments and model have besides
# Runs of one launch of ranks, by what they show; those after the first are slow.
GROUPS: dict[str, list[Run]] = {
    "usual": [
        ("DPO", WITH_SFT | {"max_steps": 2}),
        ("Reward", FAST | {"center_rewards_coefficient": 0.01, "max_steps": 2}),
    ],
    "losses": [
        *(("DPO", {"loss_type": [name]}) for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")),
        *(("DPO", {"loss_type": [name]}) for name in ("apo_zero", "apo_down", "discopop", "sft")),
        ("DPO", FAST | {"loss_type": ["sigmoid_norm"]}),
        *(("DPO", {"loss_type": [name], "label_smoothing": 0.1}) for name in ("exo_pair", "robust")),
        ("DPO", {"loss_type": ["discopop", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
        ("DPO", {"use_weighting": True}),
        ("DPO", {"f_divergence_type": "forward_kl"}),
        ("DPO", {"f_divergence_type": "js_divergence", "loss_type": ["ipo"]}),
        ("DPO", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5}),
    ],
    "references": [
        ("DPO", FAST | {"lora": "new"}),
        ("DPO", FAST | WITH_SFT | {"lora": "ref"}),
        ("DPO", {"other": "model-5", "ld_alpha": 0.5}),
        ("DPO", {"other": "model-5", "columns": "of model-5"}),
        ("DPO", FAST | {"start": "tied"}),
    ],
    "packs": [
        ("DPO", WITH_SFT | {"share_prefixes": "off", "max_steps": 2}),
        ("DPO", {"max_length": 58, "truncation_mode": "keep_end"}),
        ("DPO", WITH_SFT | {"fused": True}),
        ("DPO", WITH_SFT | {"exact": True, "pad_to_multiple_of": 8, "gradient_checkpointing": False}),
        ("DPO", {"evals": True, "dataloader_num_workers": 1}),
        ("DPO", {"gradient_accumulation_steps": 3, "loss_type": ["ipo"], "per_device_train_batch_size": 2}),
    ],
    "packs of reward models": [
        ("Reward", FAST | {"columns": {"margin": [index % 5 / 4 for index in range(case.PAIRS)]}}),
        ("Reward", FAST | {"pad_token": "<end>", "pad_to_multiple_of": 8}),  # TRL scores the token before it
        ("Reward", FAST | {"exact": True, "gradient_checkpointing": False, "evals": True}),
        ("Reward", FAST | {"lora": "score"}),
        ("Reward", FAST | {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
        ("Reward", FAST | {"backend": "cpu-sharded"}),  # gathers weights only during a forward
    ],
    "bf16": [("DPO", {"bf16": True}), ("Reward", FAST | {"bf16": True})],  # accelerate has one such choice per process
}
_NOT_FUSED = ("logits/chosen", "logits/rejected", "mean_token_accuracy")


def _folders(tmp_path: Path) -> None:
    """Models of language, and a classifier."""
    for seed in (0, 5):
        torch.manual_seed(seed)
        causal_lm("Qwen2").save_pretrained(tmp_path / f"model-{seed}")
    case.save_classifier(str(tmp_path / "classifier"))
    shutil.copytree(tmp_path / "model-0", tmp_path / "tied")
    tie_in_config(tmp_path / "tied")


def _each(rank: int, world: int, ours: bool, folder: str, group: str) -> list[dict[str, Any]]:
    """Of each run of the group what it left: by TRL's own trainer, or ours."""
    found = []
    for index, (kind, changes) in enumerate(GROUPS[group]):
        given = dict(changes)
        if "other" in given:
            given["other"] = f"{folder}/{given['other']}"
        if given.get("columns") == "of model-5":
            given["columns"] = _columns(given["other"])
        start = f"{folder}/{given.pop('start', 'model-0' if kind == 'DPO' else 'classifier')}"
        found.append(case.run(kind, ours, world, f"{folder}/{ours}-{index}", start, given))
    return found


def _columns(start: str) -> dict[str, list[float]]:
    """Log-probabilities of each pair's completions, by plain transformers."""
    model, tokens = model_of(start).eval(), tokenizer()
    columns: dict[str, list[float]] = {"ref_chosen_logps": [], "ref_rejected_logps": []}
    for index in range(case.PAIRS):
        pair = case.pair(index)
        for name in ("chosen", "rejected"):
            prompt = tokens(pair["prompt"])["input_ids"]
            completion = tokens(pair["prompt"] + pair[name] + "<end>")["input_ids"][len(prompt) :]
            columns[f"ref_{name}_logps"].append(float(log_probabilities(model, prompt, completion, 1.0).sum()))
    return columns


def _uncompared(changes: dict[str, Any]) -> tuple[str, ...]:
    """Metrics that are others in TRL: not of a fused head, means of batches, pairs of nearly the same rewards."""
    if "gradient_accumulation_steps" in changes:
        return ("entropy", *_NOT_FUSED, "min_reward", "max_reward")
    accuracies = ("rewards/accuracies", "eval_rewards/accuracies", "accuracy", "eval_accuracy")
    return _NOT_FUSED if "fused" in changes else accuracies if "bf16" in changes else ()


@pytest.mark.parametrize(
    ("group", "world"), [("usual", 2), slow("usual", 3), *(slow(group, 2) for group in GROUPS if group != "usual")]
)
def test_as_trl(tmp_path: Path, group: str, world: int) -> None:
    _folders(tmp_path)
    (plain,) = ranks.run(_each, 1, False, str(tmp_path), group)
    ours = ranks.run(_each, world, True, str(tmp_path), group)
    for (kind, changes), of_trl, *of_ranks in zip(GROUPS[group], plain, *ours, strict=True):
        if "fused" in changes:
            assert not any(set(_NOT_FUSED) & entry.keys() for result in of_ranks for entry in result["logs"])
        assert {"rewards/margins", "margin"} & of_trl["logs"][0].keys()
        for entry in (*of_trl["logs"], *(entry for result in of_ranks for entry in result["logs"])):
            for name in _uncompared(changes):
                entry.pop(name, None)
        assert_alike(of_ranks, of_trl, tolerance=5e-2 if "bf16" in changes else 1e-5)
        known = kind == "Reward" or "columns" in changes or {"lora"} & changes.keys()
        assert all(result["reference"] is not bool(known) for result in of_ranks)
        apart, computed = (sum(result["computed"] for result in results) for results in ([of_trl], of_ranks))
        if group == "usual":  # of both, prompts of a pair; TRL computes padding too
            assert computed < 0.75 * apart


# ------------------------------------------------------------------ checkpoints


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}


def _saved(rank: int, world: int, folder: str, name: str, resume: str | None = None) -> dict[str, Any]:
    return case.run("DPO", True, world, f"{folder}/{name}", f"{folder}/model-0", SAVING | WITH_SFT, resume)


@pytest.mark.slow
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    """And the last checkpoint is a model of plain transformers."""
    from transformers import AutoModelForCausalLM

    _folders(tmp_path)
    whole = ranks.run(_saved, 2, str(tmp_path), "whole")[0]
    resumed = ranks.run(_saved, 3, str(tmp_path), "resumed", f"{tmp_path}/whole/checkpoint-2")[0]
    for got, want in zip(resumed["logs"][:-1], whole["logs"][:-1], strict=True):
        for name in want.keys() & {"step", "loss", "rewards/margins", "eval_loss", "eval_rewards/chosen"}:
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    for name, value in model.named_parameters():
        torch.testing.assert_close(resumed["weights"][name], value, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ packing, and what is refused


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_packed_classifiers(tmp_path: Path, family: str) -> None:
    """Scores of any tokens are those of rows that end there; without `logits_to_keep` the forward is as it was."""
    from odc_triton.hf import enable_packing

    case.save_classifier(str(tmp_path), family)
    plain, packed = (case.model_for("Reward", str(tmp_path)).eval() for _ in range(2))
    enable_packing(packed)
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = packed(input_ids=ids, position_ids=positions, logits_to_keep=torch.tensor([3, 6])).logits
    want = torch.cat([plain(input_ids=ids[:, :4]).logits, plain(input_ids=ids[:, 4:7]).logits])
    torch.testing.assert_close(found, want[None])
    torch.testing.assert_close(packed(input_ids=ids).logits, plain(input_ids=ids).logits)


_BOTH = [
    ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1: TRL's loss has no targets to smooth"),
    ({"activation_offloading": True}, {}, "activation_offloading=True: TRL's step is not run"),
    ({}, {"share_prefixes": "on"}, "share_prefixes is 'on': give 'auto' or 'off'"),
    ({}, {"compute_metrics": print}, "compute_metrics is given, and packs have no logits"),
    ({}, {"peft_config": object()}, "peft_config is given, but the trainer takes a sharded model"),
    ({"max_length": 2}, {}, "max_length=2 leaves nothing to learn of any of 2 samples of the train data set"),
]
# Arguments, what else the trainer is given, and the error.
REFUSED = {
    "DPO": [
        *_BOTH,
        ({"loss_type": ["aot"]}, {}, "DPOConfig has loss_type 'aot', which sorts a batch"),
        ({"loss_type": ["sigmoid", "aot_unpaired"]}, {}, "loss_type 'aot_unpaired'"),
        ({"sync_ref_model": True}, {}, "sync_ref_model=True: it would write into the reference's shards"),
        ({"precompute_ref_log_probs": True}, {}, "precompute_ref_log_probs=True: a sharded reference takes little"),
        (
            {},
            {},
            "there is no ref_model, and the reference model is loaded from the model's folder or hub id, which is",
        ),
    ],
    "Reward": [
        *_BOTH,
        ({"chat_template_path": "other"}, {}, "chat_template_path='other': it may add tokens to a model"),
    ],
}


_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def _refusals(rank: int, world: int, folder: str) -> None:
    import trl

    from odc_triton import MinibatchFailed, fully_shard, hf

    environment()
    data = {"train_dataset": case.dataset([0, 1]), "processing_class": tokenizer()}
    starts = {"DPO": None, "Reward": f"{folder}/classifier"}
    models = {kind: case.sharded(kind, start) for kind, start in starts.items()}
    unpacked = {kind: fully_shard(case.model_for(kind, start)) for kind, start in starts.items()}

    def arguments(kind: str, **changes: Any) -> Any:
        return case.arguments(kind, f"{folder}/out", **{"eval_strategy": "no"} | changes)

    def make(kind: str, model: Any = None, changes: dict[str, Any] | None = None, **given: Any) -> Any:
        given = {"args": arguments(kind, **changes or {})} | data | given
        return getattr(hf, f"ODC{kind}Trainer")(model or models[kind], **given)

    for kind, cases in REFUSED.items():
        for changes, given, words in cases:
            with pytest.raises(ValueError, match=re.escape(words)):
                make(kind, changes=changes, **given)
    images, stream = case.dataset([0, 1], {"image": ["a", "b"]}), data["train_dataset"].to_iterable_dataset()
    long = images.remove_columns("image").map(lambda each: {"prompt": "w5 " * 2000})
    language = case.sharded("DPO", None)
    language.config.num_labels = 1
    reference, dpo, apart = (
        case.sharded("DPO", None),
        models["DPO"],
        "'s attention does not keep a pack's documents apart",
    )
    for kind, model, given, words in (
        ("DPO", None, {"args": None}, r"args is a NoneType; give a trl\.DPOConfig"),
        ("Reward", None, {"args": arguments("DPO")}, r"args is a DPOConfig; give a trl\.RewardConfig"),
        ("DPO", case.model_for("DPO", None), {}, "Qwen2ForCausalLM is not sharded"),
        ("DPO", unpacked["DPO"], {"ref_model": reference}, f"the model{apart}"),
        ("Reward", unpacked["Reward"], {}, f"the model{apart}"),
        ("Reward", language, {}, "has no scores of single tokens: give a model of AutoModelForSequenceClassification"),
        ("DPO", None, {"ref_model": unpacked["DPO"]}, f"ref_model{apart}"),
        ("DPO", None, {"ref_model": case.model_for("DPO", None)}, "ref_model is not sharded: call enable_packing and"),
        ("DPO", None, {"ref_model": dpo}, "ref_model is the model itself"),
        (
            "DPO",
            None,
            {"eval_dataset": {"a": long}},
            "max_length=1024 leaves nothing to learn of any of 2 samples of the a data set",
        ),
        (
            "Reward",
            None,
            {"eval_dataset": long},
            "max_length=1024 leaves nothing to learn of any of 2 samples of the eval data set",
        ),
        ("DPO", None, {"train_dataset": long.select([])}, "train_dataset: the data set has no samples"),
        ("DPO", None, {"train_dataset": images}, "contains 'image' or 'images' keys"),
        ("DPO", None, {"ref_model": reference, "train_dataset": stream}, "IterableDataset"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            make(kind, model, **given)
    with pytest.raises(TypeError, match="IterableDataset"):
        make("DPO", ref_model=reference, eval_dataset=stream).evaluate()
    held_out, wrong = (case.dataset([0, 1], columns) for columns in (None, {name: [50.0, 60.0] for name in _COLUMNS}))
    wanted = make("DPO", ref_model=reference, eval_dataset=held_out).evaluate()["eval_loss"]
    for each in (held_out, wrong):  # a given ref_model goes before columns
        assert make("DPO", ref_model=reference).evaluate(each)["eval_loss"] == pytest.approx(wanted)
    columns = make("DPO", train_dataset=wrong)
    assert columns.evaluate(wrong)["eval_loss"] != pytest.approx(wanted)
    with pytest.raises(
        ValueError, match="have no ref_chosen_logps and ref_rejected_logps, which the training data have"
    ):
        columns.evaluate(held_out)
    with pytest.raises(ValueError, match=r"ODCDPOTrainer\.predict: packs have no logits to return"):
        columns.predict(held_out)
    adapted = with_lora(case.model_for("DPO", None))
    hf.enable_packing(adapted)
    with pytest.warns(UserWarning, match="the adapters are trained already, and the reference is the model without"):
        make("DPO", fully_shard(adapted))
    with pytest.raises(MinibatchFailed, match="use_weighting needs all probabilities"):
        make("DPO", case.sharded("DPO", None, fused=True), {"use_weighting": True}, ref_model=reference).train()
    trl.__version__ = "1.17.0"
    with pytest.raises(ImportError, match=r"ODCDPOTrainer is written for TRL 1.15 or 1.16, and 1.17.0 is here"):
        make("DPO")


@pytest.mark.slow
def test_refused(tmp_path: Path) -> None:
    case.save_classifier(str(tmp_path / "classifier"))
    ranks.run(_refusals, 1, str(tmp_path))
