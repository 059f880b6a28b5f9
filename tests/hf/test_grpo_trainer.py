"""ODCGRPOTrainer on real ranks, against TRL's own GRPOTrainer on one process with the same completions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks, slow
from tests.support import trl_case as case
from tests.support.families import causal_lm
from tests.support.models import build
from tests.support.sampling import greedy
from tests.support.trl_case import ROWS, STEPS, assert_alike

# At the second update of the same completions ratios are not 1; so near to 1 some are clipped.
TWICE = {"num_iterations": 2, "epsilon": 0.1}
VLLM = {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.01}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 4.0, "entropy_coef_delta": 0.04}
# All prompts begin with 40 tokens, and those of a group are the same 81 or more.
SHARED = {"before": 40}
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "sapo", "vespo")


def _saved(tmp_path: Path, seed: int = 0) -> str:
    """A folder to load model and reference from."""
    torch.manual_seed(seed)
    model = causal_lm("Qwen2")
    model.save_pretrained(tmp_path / f"model-{seed}")
    return str(tmp_path / f"model-{seed}")


pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")

Run = tuple[str, dict[str, Any]]  # a loss, and what the arguments have besides
# Runs of one launch of ranks, by what they show; those after the first are slow.
GROUPS: dict[str, list[Run]] = {
    "usual": [
        ("dapo", TWICE | {"beta": 0.5}),
        ("dapo", TWICE | SHARED | {"beta": 0.5}),
        ("grpo", {"mask_truncated_completions": True, "eval_strategy": "steps", "eval_steps": 2, "fused": True}),
    ],
    "losses": [
        *((loss_type, TWICE) for loss_type in LOSSES),
        ("cispo", TWICE | {"epsilon_high": 1.01}),  # the largest ratio
        *((loss_type, TWICE | {"importance_sampling_level": "sequence"}) for loss_type in ("grpo", "luspo")),
        ("dapo", TWICE | {"exact": True}),
    ],
    "limits": [
        ("dapo", TWICE | {"delta": 1.001, "epsilon_high": 2e-3, "scale_rewards": "batch"}),
        ("bnpo", TWICE | {"mask_truncated_completions": True, "off_policy_mask_threshold": 1e-6}),
        ("cispo", TWICE | {"epsilon_high": 1.01, "token_cap": 64, "gradient_checkpointing": False}),
        ("vespo", TWICE | {"scale_rewards": "none", "eval_strategy": "steps", "eval_steps": 1}),
        ("dr_grpo", TWICE | {"gradient_accumulation_steps": 2}),
    ],
    "shared prefixes": [
        ("bnpo", TWICE | SHARED),
        ("grpo", TWICE | SHARED | {"importance_sampling_level": "sequence", "gradient_checkpointing": False}),
        ("dr_grpo", SHARED | {"mask_truncated_completions": True, "eval_strategy": "steps", "eval_steps": 1}),
        ("dapo", TWICE | SHARED | {"fused": True, "token_cap": 180, "gradient_accumulation_steps": 2}),
        ("dapo", TWICE | SHARED | {"exact": True}),
        ("bnpo", TWICE | SHARED | {"rollout": True, "off_policy_mask_threshold": 1e-3}),
        ("cispo", TWICE | SHARED | {"epsilon_high": 1.01, "share_prefixes": "off"}),
    ],
    "other samplers": [
        ("vespo", TWICE | VLLM | {"vllm_importance_sampling_mode": "token_truncate"}),
        ("grpo", VLLM | {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_mode": "colocate"}),
        ("bnpo", TWICE | {"rollout": True, "off_policy_mask_threshold": 1e-3}),
        ("dapo", TWICE | {"streamed": True, "steps_per_generation": 2, "gradient_accumulation_steps": 2}),
    ],
    "entropies": [
        ("dapo", TWICE | {"entropy_coef": 0.1}),
        ("bnpo", SHARED | {"entropy_coef": 0.1, "fused": True, "mask_truncated_completions": True}),
        ("sapo", TWICE | {"top_entropy_quantile": 0.3, "entropy_coef": 0.1}),
        ("dr_grpo", TWICE | SHARED | {"top_entropy_quantile": 0.5, "beta": 0.5, "exact": True, "token_cap": 180}),
        ("luspo", TWICE | ADAPTIVE | {"entropy_target": 4.6}),  # of at most log 97
        ("dapo", ADAPTIVE | {"rollout": True, "top_entropy_quantile": 0.4, "entropy_coef": 0.1}),
    ],
    "adapters": [
        ("dapo", TWICE | {"lora": "base", "beta": 0.5, "epsilon": 1e-3}),
        ("grpo", TWICE | SHARED | {"lora": "ref", "beta": 0.5, "fused": True}),
        ("vespo", VLLM | {"lora": "base", "vllm_importance_sampling_mode": "token_truncate"}),
    ],
    "one rank": [
        ("dapo", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "beta": 0.1}),
        ("dr_grpo", {"steps_per_generation": 2, "epsilon": 1e-3}),
    ],
    "replicas": [("dapo", TWICE | {"beta": 0.5, "replicas": 2}), ("grpo", {"beta": 0.5, "replicas": 1})],
    "bf16": [("dapo", TWICE | {"bf16": True, "beta": 0.5})],  # accelerate has one such choice per process
}
_OURS = ("share_prefixes", "fused", "token_cap", "exact", "replicas")
WORLDS = {"one rank": 1, "replicas": 4}  # others have two


def _each(rank: int, world: int, run: Callable, folder: str, start: str, group: str) -> list[dict[str, Any]]:
    """Of each run of the group what `run` found: TRL's own trainer, or ours."""
    found = []
    for index, (loss_type, changes) in enumerate(GROUPS[group]):
        taken = {name: value for name, value in changes.items() if run is case.odc_run or name not in _OURS}
        where = f"{folder}/{run.__name__}-{index}", start if "beta" in changes else None
        found.append(run(rank, world, *where, taken | {"loss_type": loss_type}))
    return found


@pytest.mark.parametrize("group", ["usual", *(slow(group) for group in GROUPS if group != "usual")])
def test_as_trl(tmp_path: Path, group: str) -> None:
    start = _saved(tmp_path)
    (plain,) = ranks.run(_each, 1, case.plain_run, str(tmp_path), start, group)
    ours = ranks.run(_each, WORLDS.get(group, 2), case.odc_run, str(tmp_path), start, group)
    for (loss_type, changes), of_trl, *of_ranks in zip(GROUPS[group], plain, *ours, strict=True):
        _assert_as_trl(loss_type, changes, of_ranks, of_trl)


def _assert_as_trl(loss_type: str, changes: dict[str, Any], results: list[dict], plain: dict[str, Any]) -> None:
    bf16 = "bf16" in changes  # rounds a pack's rows otherwise than a batch's, and a ratio near the clip falls on a side
    batches = changes.get("gradient_accumulation_steps", 1)
    assert_alike(results, plain, tolerance=5e-2 if bf16 else 1e-5, batches=batches)
    if loss_type == "dapo" and changes.get("num_iterations"):
        assert 0 < plain["logs"][1]["clip_ratio/region_mean"] < 1  # or clipping would not show
    if "beta" in changes:
        assert all("kl" in entry for entry in plain["logs"][:STEPS])
        stays = () if "lora" in changes else build("qwen2").named_parameters()
        for name, weight in stays:
            assert torch.equal(results[-1]["reference"][name], weight), name
    if "use_adaptive_entropy" in changes:
        assert len({entry["entropy_coef"] for entry in plain["logs"][:STEPS]}) == STEPS
    if "before" in changes:
        _assert_shared(results, outside="beta" in changes, off="share_prefixes" in changes)
    assert all(sum(rows) == ROWS * batches for rows in zip(*(result["rows"] for result in results), strict=True))
    if "mask_truncated_completions" in changes or "exact" in changes:
        return  # a pack may have nothing to compute, or be computed once more
    # Else rows would not be assigned by their lengths; of 16 each may get 8, of two groups one.
    if len(results) == 2 and batches == 1 and "before" not in changes:
        assert any(mine != others for mine, others in zip(*(result["rows"] for result in results), strict=True))
    for result in results:
        assert result["forwards"] == sum(result["packs"])


def _assert_shared(results: list[dict], *, outside: bool, off: bool) -> None:
    """Prompts were computed once in a pack, in minibatches and for old and reference log-probabilities."""
    tokens = [sum(of_step) for of_step in zip(*(result["tokens"] for result in results), strict=True)]
    computed = sum(result["computed"] for result in results)
    assert computed == sum(tokens) if off else computed < 0.6 * sum(tokens)
    if outside:  # before the first and the third step
        assert sum(result["computed_outside"] for result in results) < 0.6 * 2 * (tokens[0] + tokens[2])


ROUTER = SHARED | {"router_aux_loss_coef": 0.5}


def _with_routers(rank: int, world: int, run: Callable, folder: str, start: str, changes: dict) -> list[dict[str, Any]]:
    return [
        run(rank, world, f"{folder}/{run.__name__}-{loss_type}", start, ROUTER | changes | {"loss_type": loss_type})
        for loss_type in ("dapo", "grpo")
    ]


@pytest.mark.slow
def test_a_routers_loss_as_trl(tmp_path: Path) -> None:
    """On microbatches of one row, whose losses TRL averages; prompts are computed for each completion."""
    torch.manual_seed(0)
    causal_lm("Mixtral").save_pretrained(start := str(tmp_path / "model"))
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS}
    (plain,) = ranks.run(_with_routers, 1, case.plain_run, str(tmp_path), start, alone)
    ours = ranks.run(_with_routers, 2, case.odc_run, str(tmp_path), start, {})
    for of_trl, *of_ranks in zip(plain, *ours, strict=True):
        assert of_trl["logs"][0]["aux_loss"] > 1
        assert_alike(of_ranks, of_trl, batches=ROWS)


# ------------------------------------------------------------------ outside of minibatches


def _sampled(rank: int, world: int, folder: str, lora: str | None = None) -> list[list[int]] | None:
    """Rank 0 samples, greedily, and rank 1 does not; then both train on what they sample."""
    from odc_triton.hf import ODCGRPOTrainer

    case.environment()
    args = case.arguments(folder, ROWS // world, generation_kwargs={"do_sample": False}, max_steps=1)
    trainer = ODCGRPOTrainer(case.sharded(fused=True, lora=lora), args=args, **case.given())
    trainer.model.train()
    prompts = [[5, 9, 3], [17, 40, 2, 8, 11], [6]]
    found = trainer._generate_single_turn(prompts, None, {}, 1)[0] if rank == 0 else None
    assert trainer.model.training
    trainer.train()
    return found


def _assert_greedy(found: list[list[int]], lora: str | None = None) -> None:
    model = case.adapted(build("qwen2"), lora).eval()
    for prompt, completion in zip([[5, 9, 3], [17, 40, 2, 8, 11], [6]], found, strict=True):
        want = greedy(model, prompt, case.MAX_TOKENS)
        assert completion == want[: want.index(case.END) + 1 if case.END in want else None]


@pytest.mark.slow
def test_adapters_sample(tmp_path: Path) -> None:
    _assert_greedy(ranks.run(_sampled, 2, str(tmp_path), "base")[0], "base")


def _outside(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What happens around steps and when one fails; each with a trainer of its own."""
    found: dict[str, Any] = {"sampled": _sampled(rank, world, f"{folder}/sampled")}
    for what in FAILURES:
        found[what] = _failing(rank, world, f"{folder}/{what}", what)
    masked = _all_masked(rank, world, case.odc_run, f"{folder}/masked")  # last, as it changes what is sampled
    return found | {"masked": masked}


@pytest.mark.slow
def test_outside_of_minibatches(tmp_path: Path) -> None:
    found = ranks.run(_outside, 2, str(tmp_path))
    (plain,) = ranks.run(_all_masked, 1, case.plain_run, str(tmp_path / "plain"))
    _assert_greedy(found[0]["sampled"])
    for result in found:
        for what, words in FAILURES.items():
            assert re.search(words, result[what]), result[what]
        masked = result["masked"]
        assert masked["logs"][0]["loss"] == masked["logs"][0]["grad_norm"] == 0
        assert masked["forwards"] == 0
        for name, weight in plain["weights"].items():
            assert name.endswith(("norm.weight", "bias")) or weight.norm() < 0.95 * plain["start"][name].norm()
            torch.testing.assert_close(masked["weights"][name], weight, rtol=1e-6, atol=0)


FAILURES = {
    "loss": "rank 1: AttributeError: there is no accelerator.pad_across_processes in a minibatch",
    "cap": "over the token_cap of 10",
    "images": r"the batch has pixel_values, a tensor of \(3, 4, 4\): only text is supported",
}


# ------------------------------------------------------------------ checkpoints


SAVING = TWICE | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


# With adapters the base is not in checkpoints.
ADAPTED = ADAPTIVE | {"lora": "ref", "beta": 0.5, "entropy_target": 4.6, "streamed": True}


def _stopped(rank: int, world: int, folder: str, start: str | None, other: str, more: dict) -> list[dict[str, Any]]:
    whole = case.odc_run(rank, world, f"{folder}/whole", start, SAVING | more)
    checkpoint = f"{folder}/whole/checkpoint-2"
    return [whole, case.odc_run(rank, world, f"{folder}/resumed", other, SAVING | more, checkpoint)]


@pytest.mark.parametrize("more", [{}, slow(ADAPTED)], ids=["", "adapters"])
def test_resume(tmp_path: Path, more: dict[str, Any]) -> None:
    """At the end of the second update of the same completions."""
    other = _saved(tmp_path, seed=9)  # other weights, to be overwritten
    start = _saved(tmp_path) if more else None
    whole, resumed = ranks.run(_stopped, 2, str(tmp_path), start, start or other, more)[0]
    if more:
        files = {file.name for file in (tmp_path / "whole" / "checkpoint-2").iterdir()}
        assert "adapter_model.safetensors" in files
        assert "model.safetensors" not in files
        assert len({entry["entropy_coef"] for entry in whole["logs"][:4]}) > 1
    assert [entry["step"] for entry in resumed["logs"]] == [1, 2, 3, 4, 4]
    for got, want in zip(resumed["logs"][:4], whole["logs"], strict=False):
        for name in want.keys() & {"loss", "grad_norm", "entropy", "clip_ratio/region_mean", "reward", "entropy_coef"}:
            # Sums over ranks come in another order.
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
    for name, want in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ what is refused


REFUSED = [
    ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True: it replaces the head"),
    ({"sync_ref_model": True}, "sync_ref_model=True: it would write into the reference's shards"),
    ({"use_transformers_continuous_batching": True}, "its attention would replace that of enable_packing"),
    ({"gradient_accumulation_steps": 2}, "steps_per_generation is 1, which gradient_accumulation_steps=2 does not"),
    *(
        ({"gradient_accumulation_steps": 2} | changes, "is 2 with loss_type 'bnpo', an entropy bonus or a top_entropy")
        for changes in ({"loss_type": "bnpo"}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.2})
    ),
    ({"beta": 0.1}, "hub id, which is unknown"),
    ({"use_vllm": True}, "vLLM loads the model from its folder or hub id, which is unknown"),
    ({"use_vllm": True, "loss_type": "vespo"}, "vllm_importance_sampling_mode is 'sequence_mask' with loss_type"),
    ({"token_cap": 0}, "token_cap is 0: give the most tokens"),
    ({"share_prefixes": "on"}, "share_prefixes is 'on': give 'auto' or 'off'"),
]


def _refusals(rank: int, world: int, folder: str) -> None:
    import transformers
    import trl

    from odc_triton import fully_shard
    from odc_triton.hf import ODCGRPOTrainer, ODCSFTTrainer

    case.environment()
    given, model = case.given(), case.sharded()
    for changes, words in REFUSED:
        own = {name: changes.pop(name) for name in ("token_cap", "share_prefixes") if name in changes}
        args = case.arguments(folder)  # TrainingArguments itself wants a GPU for bf16
        for name, value in changes.items():
            setattr(args, name, value)
        with pytest.raises(ValueError, match=re.escape(words)):
            ODCGRPOTrainer(model, args=args, **given, **own)
        assert (args.beta, args.use_vllm) == (changes.get("beta", 0.0), changes.get("use_vllm", False))
    args = case.arguments(folder)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "layer_types": ["conv", "full_attention"]}
    lfm = transformers.Lfm2Config(**sizes, num_hidden_layers=2, conv_bias=True)
    for wrong, options, words in (
        (fully_shard(transformers.Lfm2ForCausalLM(lfm)), {"args": args}, "Lfm2ForCausalLM has a bias before a convol"),
        (model, {}, r"args is a NoneType; give a trl\.GRPOConfig"),
        (model, {"args": transformers.TrainingArguments(folder, use_cpu=True)}, "args is a TrainingArguments"),
        (fully_shard(nn.Linear(2, 2)), {"args": args}, "model is a ODCLinear; give the transformers model that"),
        (build("qwen2"), {"args": args}, "Qwen2ForCausalLM is not sharded"),
        (model, {"args": args, "peft_config": object()}, "peft_config is given, .* call peft.get_peft_model before"),
        (fully_shard(build("qwen2")), {"args": args}, "does not keep a pack's documents apart"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            ODCGRPOTrainer(wrong, **options, **given)
    for able, noise, shared_rows in ((True, None, 8), (False, None, 0), (True, 0.1, 0)):
        model._odc_takes_branches = able
        trainer = ODCGRPOTrainer(model, args=case.arguments(folder, neftune_noise_alpha=noise), **given)
        assert trainer._share_rows(model) == shared_rows
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.001
    assert ODCGRPOTrainer(model, args=case.arguments(folder), **given)._share_rows(model) == 0
    del model.config.output_router_logits
    for prompts, words in (
        (0, "train_dataset: the data set has no samples"),
        (1, "has 1 prompts, and a step samples for 2"),
    ):
        few = given | {"train_dataset": given["train_dataset"].select(range(prompts))}
        with pytest.raises(ValueError, match=words):
            ODCGRPOTrainer(model, args=args, **few)
    args.generation_batch_size = 64
    with pytest.raises(ValueError, match=r"generation_batch_size 64, and 1 ranks .* make 8"):
        ODCGRPOTrainer(model, args=args, **given)
    trl.__version__ = "1.17.0"
    with pytest.raises(ImportError, match=r"written for TRL 1.15 or 1.16, and 1.17.0 is here"):
        ODCGRPOTrainer(model, args=args, **given)
    trl.__version__ = "1.0.0"  # whose collator masks prompts: packs, which are made without it, would learn them
    with pytest.raises(ImportError, match=r"ODCSFTTrainer is written for TRL 1.15 or 1.16, and 1.0.0 is here"):
        ODCSFTTrainer(model)


def test_refused(tmp_path: Path) -> None:
    ranks.run(_refusals, 1, str(tmp_path))


def _all_masked(rank: int, world: int, run: Callable, folder: str) -> dict[str, Any]:
    """No completion ends, and all are masked: there is nothing to learn, and weights decay."""
    case.END = 0
    case.completion = lambda step, index: [5] * (1 + index % 3)
    decays = {"optim": "adamw_torch", "weight_decay": 0.5}
    return run(rank, world, folder, None, decays | {"mask_truncated_completions": True, "max_steps": 2})


def _failing(rank: int, world: int, folder: str, what: str) -> str:
    """A step that fails on one rank, or on all; returns the error."""
    from odc_triton.base.errors import MinibatchFailed

    trainer = case.odc_trainer(folder, world, token_cap=10 if what == "cap" else None)
    if what == "loss":
        compute = trainer._compute_loss

        def fails_on_rank_1(model: nn.Module, inputs: Any) -> torch.Tensor:
            if rank == 1:
                trainer.accelerator.pad_across_processes(inputs["advantages"])
            return compute(model, inputs)

        trainer._compute_loss = fails_on_rank_1
    if what == "images":
        prepare = trainer._prepare_inputs
        trainer._prepare_inputs = lambda inputs: prepare(inputs) | {"pixel_values": torch.zeros(3, 4, 4)}
    with pytest.raises((MinibatchFailed, ValueError)) as caught:
        trainer.train()
    return str(caught.value)


def test_without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    import odc_triton.hf

    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "odc_triton.jobs.trainers.grpo_trainer", raising=False)
    assert "ODCGRPOTrainer" not in odc_triton.hf.__all__
    with pytest.raises(ImportError, match=r'needs TRL 1.15 or 1.16: pip install "odc-triton\[trl\]"'):
        odc_triton.hf.ODCGRPOTrainer  # noqa: B018
