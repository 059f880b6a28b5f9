"""What was trained is written: each kind of adapter and of ties, reloaded by plain PEFT and transformers, by logits."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odc_triton import fully_shard, minibatch, offer_policy, replace_layers
from odc_triton.checkpoint import save_pretrained
from odc_triton.checkpoint.dcp import read_metadata, tensors_of
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from odc_triton.checkpoint.pretrained_tensors import require_written
from odc_triton.jobs.vllm.policy_server import difference
from tests.support import ranks
from tests.support.families import causal_lm

# PEFT asks transformers by a name that is going away.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

IDS = torch.arange(3, 23)[None]
QV, TIED, EMBED = {"target_modules": ["q_proj", "v_proj"]}, {"tie_word_embeddings": True}, ["embed_tokens"]
LORA = {"init_lora_weights": False} | QV  # else A has no gradient at first


def _adapter(
    base: dict[str, Any] | None = None, *, by: str = "Lora", family: str = "Qwen2", unmergeable: str = "", **given: Any
) -> tuple[str, dict[str, Any], str, dict[str, Any], str]:
    """PEFT's config, its arguments, the base's family and config, and why it can't be merged."""
    return f"{by}Config", (LORA if by == "Lora" else {}) | given, family, base or {}, unmergeable


TOKENS = {"trainable_token_indices": [3, 5]}
ADAPTERS = {
    "lora": _adapter(TIED),
    "transformers' own": _adapter(TIED),
    "dora": _adapter(use_dora=True),
    "lora_bias": _adapter(lora_bias=True),
    "lora_bias without bias": _adapter(
        lora_bias=True,
        target_modules=["v_proj", "o_proj"],
        unmergeable="o_proj: PEFT can't merge it .*base layer has no bias",
    ),
    "bias": _adapter(bias="lora_only"),
    "modules, tied": _adapter(TIED, modules_to_save=["lm_head"]),
    "modules, kept tied": _adapter(TIED, modules_to_save=EMBED, ensure_weight_tying=True),
    "tokens": _adapter(**TOKENS),
    "tokens, tied": _adapter(TIED, **TOKENS),
    "several, tied": _adapter(TIED, **TOKENS, modules_to_save=["norm"], bias="lora_only", use_dora=True),
    "embeddings, tied": _adapter(TIED, target_modules=EMBED),
    "head, tied": _adapter(TIED, target_modules=["lm_head"]),
    "experts": _adapter(family="Qwen3Moe", target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "transposed": _adapter(TIED, family="GPT2", target_modules=["c_attn"]),
    "ia3": _adapter(by="IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ln": _adapter(by="LNTuning", target_modules=["norm", "input_layernorm"]),
    "loha": _adapter(by="LoHa", init_weights=False, **QV),
    "adalora": _adapter(by="AdaLora", total_step=10, **QV),
    "oft": _adapter(by="OFT", oft_block_size=4, **QV),
    "boft": _adapter(by="BOFT", boft_block_size=4, **QV),
    "a second adapter is trained": _adapter(TIED),
    "blocks are wrapped": _adapter(TIED, modules_to_save=["norm"]),
    "hooks hold locks": _adapter(use_dora=True),
}
ADAPTERS["experts as layers"] = ADAPTERS["experts"]


def _second_adapter(model: Any) -> None:
    model.add_adapter("b", model.peft_config["default"])
    model.set_adapter("b")


def _wrap_blocks(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    torchs.apply_activation_checkpointing(model, check_fn=lambda each: type(each).__name__ == "Qwen2DecoderLayer")


def _hook_locks(model: Any) -> None:
    lock = threading.Lock()
    for module in model.modules():
        module.register_forward_hook(lambda *_, lock=lock: None)
        module.register_forward_pre_hook(partial(_hold, lock))


def _hold(lock: Any, *_: Any) -> None:
    with lock:
        pass


class _ExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"scale": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


# By name: what is done to the adapted model before it is sharded.
PREPARED: dict[str, Callable[[Any], None]] = {
    "a second adapter is trained": _second_adapter,
    "blocks are wrapped": _wrap_blocks,
    "hooks hold locks": _hook_locks,
    "experts as layers": partial(replace_layers, roles=["experts"], verbose=False),
}


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def _step(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    with minibatch(model, tokens=1):
        logits = model.train()(input_ids=IDS + rank, use_cache=False).logits[0, :-1]
        nn.functional.cross_entropy(logits, (IDS + rank)[0, 1:]).backward()
    optimizer.step()
    return optimizer


def _wait(world: int) -> None:
    if world > 1:
        dist.barrier()


def _equal(kind: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(got, want, rtol=bound, atol=bound, msg=lambda text: f"{kind}: {text}")


def _takes_peft() -> bool:
    """transformers 5.24 wants a PEFT that is not out yet, for its own adapters."""
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True


def _adapter_of(kind: str, base: nn.Module) -> nn.Module:
    import peft

    name, given, *_ = ADAPTERS[kind]
    config = getattr(peft, name)(task_type="CAUSAL_LM", **given)
    if kind == "transformers' own":
        base.add_adapter(config)
        return fully_shard(base)
    model = peft.get_peft_model(base, config)
    PREPARED.get(kind, lambda _: None)(model)
    return fully_shard(model)


def _base_of(kind: str, folder: Path) -> nn.Module:
    _, _, family, changes, _ = ADAPTERS[kind]
    torch.manual_seed(0)
    base = causal_lm(family, spread=0.05, **changes)
    base.name_or_path = str(folder)  # it is in no checkpoint
    return base


def _adapted(rank: int, world: int, folder: Path, kinds: list[str]) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    for kind in kinds:
        here, unmergeable = folder / kind, ADAPTERS[kind][-1]
        base = _base_of(kind, here / "base")
        if rank == 0:
            base.save_pretrained(here / "base")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT, on ties and merging
            model = _adapter_of(kind, base)
            require_written(model)
            before = _logits(model)
            optimizer = _step(model, rank)
            want = _logits(model)
            assert (want - before).abs().max() > 1e-4, kind  # far more than what is compared below
            if rank == 0:
                save_pretrained(model, here / "adapter")
                plain = AutoModelForCausalLM.from_pretrained(here / "base")
                # The same numbers at other addresses, for which the library may choose another kernel.
                _equal(kind, _logits(peft.PeftModel.from_pretrained(plain, here / "adapter")), want, 1e-5)
                if unmergeable:
                    with pytest.raises(NotImplementedError, match=unmergeable):
                        save_pretrained(model, here / "merged", merge=True)
                    assert not (here / "merged").exists()
                else:
                    save_pretrained(model, here / "merged", merge=True)
                    # Products in another order.
                    _equal(f"merged {kind}", _logits(AutoModelForCausalLM.from_pretrained(here / "merged")), want, 1e-4)
            _wait(world)
            write_checkpoint(here / "checkpoint", model=model, optimizer=optimizer, state={}, step=1)
            if kind == "blocks are wrapped":
                assert not any("base_layer" in name for name in tensors_of(read_metadata(here / "checkpoint")))
            other = _base_of(kind, here / "base")
            torch.manual_seed(1)
            other = _adapter_of(kind, other)
            load_checkpoint(here / "checkpoint", model=other, optimizer=None)
            assert torch.equal(_logits(other), want), kind
        _wait(world)


def _untied(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def _tied(model: nn.Module) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _of_one_memory(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())


def _frozen_embeddings(model: nn.Module) -> None:
    model.model.embed_tokens.weight.requires_grad_(False)


def _with_more(model: nn.Module) -> None:
    model.register_buffer("seen", torch.zeros(2))
    model.model.more = nn.Parameter(torch.zeros(3))


# By name: the family, its config, and what is done to the model.
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "tied": ("Qwen2", TIED, None),
    "tied by no config": ("Qwen2", {}, _tied),
    "untied, tied by its config": ("Qwen2", TIED, _untied),
    "one memory": ("Qwen2", TIED, _of_one_memory),
    "frozen and tied": ("Qwen2", TIED, _frozen_embeddings),
    "a buffer and a parameter more": ("Qwen2", {}, _with_more),
    "buffers": ("DeepseekV3", {}, None),
    "wrapped blocks": ("Qwen2", TIED, _wrap_blocks),
}


def _models(rank: int, world: int, folder: Path, kinds: list[str]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    for kind in kinds:
        family, changes, change = MODELS[kind]
        torch.manual_seed(0)
        plain, here = causal_lm(family, spread=0.05, **changes), folder / kind
        if change is not None:
            change(plain)
        model = fully_shard(plain)
        require_written(model)
        _step(model, rank)
        with torch.no_grad():
            for value in model.state_dict(keep_vars=True).values():
                if not isinstance(value, nn.Parameter):
                    value += 0.01  # as a router's correction in training
        want = _logits(model)
        if rank == 0:
            save_pretrained(model, here)
            _equal(kind, _logits(AutoModelForCausalLM.from_pretrained(here)), want, 1e-5)
            if change is _with_more:
                files = load_file(here / "model.safetensors")
                assert {"seen", "model.more"} <= files.keys()
                assert files["seen"].tolist() == pytest.approx([0.01, 0.01])
        _wait(world)


def _run(body: Callable[[int, int, Path, list[str]], None], folder: Path, kinds: list[str]) -> None:
    """Here for one kind, by two ranks for all."""
    if len(kinds) == 1:
        body(0, 1, folder, kinds)
    else:
        ranks.run(body, 2, folder, kinds)


# The fast ones protect best: most of what LoRA has, and a head that its config ties.
@pytest.mark.parametrize(
    "kinds", [pytest.param(["several, tied"], id="some"), pytest.param([*ADAPTERS], marks=pytest.mark.slow, id="all")]
)
def test_adapters(kinds: list[str], tmp_path: Path) -> None:
    _run(_adapted, tmp_path, [kind for kind in kinds if kind != "transformers' own" or _takes_peft()])


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["untied, tied by its config"], id="some"),
        pytest.param([*MODELS], marks=pytest.mark.slow, id="all"),
    ],
)
def test_models(kinds: list[str], tmp_path: Path) -> None:
    _run(_models, tmp_path, kinds)


def _lora(**given: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(causal_lm("Qwen2", tie_word_embeddings=True), peft.LoraConfig(**LORA | given))


def _trained_base() -> nn.Module:
    model = _lora()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def _changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = causal_lm("Qwen2")
    change(model)
    return model


def _start_training(model: nn.Module) -> None:
    from transformers import TrainingArguments

    from odc_triton.hf import ODCTrainer

    ODCTrainer(fully_shard(model), TrainingArguments(use_cpu=True, report_to="none"), train_dataset=[])


class _WithHead(nn.Module):
    """A model around transformers', with a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = causal_lm("Qwen2")
        self.value = nn.Linear(32, 1)


def _require(model: nn.Module) -> None:
    require_written(fully_shard(model))


# By what would be lost: the model, what must refuse it, and the words.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "the base's own, which no adapter has": (_trained_base, _start_training, r"model\.norm\.weight would be trained"),
    "outside of transformers' model": (_WithHead, _require, r"^value\.weight, value\.bias"),
    "a layer of other parameters": (
        lambda: _changed(lambda model: nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)),
        _require,
        r"^a plain Qwen2ForCausalLM has model\.layers\.0\.mlp\.up_proj\.weight,",
    ),
    "a head in a sequence": (
        lambda: _changed(lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head))),
        _require,
        r"^a plain Qwen2ForCausalLM has lm_head\.weight,",
    ),
    "PEFT's ties by transposed views": (
        lambda: _lora(target_modules=EMBED, ensure_weight_tying=True),
        fully_shard,
        r"lm_head\.lora_A\S+ is another view of \S*embed_tokens\.lora_embedding_B",
    ),
    "what other processes can't merge": (
        lambda: _lora(use_dora=True),
        lambda model: offer_policy(fully_shard(model)),
        r"q_proj\.weight is merged by PEFT's code",
    ),
}


@pytest.mark.parametrize("lost", REFUSED)
def test_refuses_before_training(lost: str) -> None:
    make, begin, words = REFUSED[lost]
    error = ValueError if begin is fully_shard else NotImplementedError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
        with pytest.raises(error, match=words):
            begin(model)


def _merged_before(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    model = _lora()
    model.merge_adapter()
    return model, {"merge": True}


def _resized(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    import peft

    base = _base_of("lora", folder / "base")
    base.save_pretrained(folder / "base")
    base.resize_token_embeddings(101, mean_resizing=False)
    return peft.get_peft_model(base, peft.LoraConfig(**LORA)), {}


def _with_extra_state(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    model, given = _lora(), {"merge": True}
    model.base_model.model.model.layers[0].mlp.up_proj.__class__ = _ExtraState
    require_written(fully_shard(model))
    return model, given


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT
@pytest.mark.parametrize("make", [_merged_before, _resized, _with_extra_state])
def test_frozen_parts_are_in_what_is_written(make: Any, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    plain, given = make(tmp_path)
    model = plain if make is _with_extra_state else fully_shard(plain)
    want = _logits(model)
    save_pretrained(model, tmp_path / "saved", **given)
    if given:
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        base.resize_token_embeddings(101)
        got = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    _equal(make.__name__, _logits(got), want, 1e-5)


def test_vllm_refuses_a_head_that_it_ties() -> None:
    config = causal_lm("Qwen2", tie_word_embeddings=True).config.to_dict()
    assert difference(config, config) is None
    assert "ties its head" in difference(config, config | {"tie_word_embeddings": False})
