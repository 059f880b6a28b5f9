"""Samples that share prefixes in a pack give the losses and gradients of unshared samples."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from odc_triton.balance import PackedDataset, count_target_tokens, pack_collate
from odc_triton.hf import enable_packing
from odc_triton.packs.loss import predictions
from odc_triton.plan.relatives import find_relatives
from tests.support.families import causal_lm, make_new_positions
from tests.support.versions import since

IGNORED = -100


def samples_of(*texts: tuple[list[int], list[int]]) -> list[dict[str, list[int]]]:
    """(prompt, completion) each."""
    return [{"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer} for prompt, answer in texts]


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B = tokens(40, 1), tokens(60, 2)
CASES = {
    "a group": samples_of(*((A, tokens(n, 10 + n)) for n in (5, 9, 7))),
    "three levels": samples_of(
        *((A + tokens(33, m), tokens(n, 10 * m + n)) for m in (3, 4) for n in (5, 8)), (A, tokens(6, 9))
    ),
    "turns": samples_of(*((A + B[: 20 * turn], B[20 * turn : 20 * turn + 20]) for turn in range(3))),
    "two groups and one alone": samples_of(
        (A, tokens(5, 1)), (B, tokens(4, 2)), (tokens(35, 7), tokens(3, 3)), (A, tokens(8, 4)), (B, tokens(6, 5))
    ),
    "one is another's beginning": samples_of((A, B[:20]), (A, B)),
    "the same twice": samples_of((A, B), (A, B)),
}


def gradients(model: nn.Module, packs: list) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for pack in packs:
        loss = F.cross_entropy(*predictions(model, pack), reduction="sum")  # summed_loss computes it in fp32
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_own_dtype(model: nn.Module) -> nn.Module:
    """Norms that would round each row's gradient to fp32: a shared row has one, unshared samples several."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def norm(x: torch.Tensor, of: nn.Module = module) -> torch.Tensor:
                scale = of.weight + (1.0 if "Gemma" in type(of).__name__ else 0.0)
                return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale

            module.forward = norm
    return model


FAMILIES = ("Qwen2", "Mistral", "Gemma2", "GptOss", "StableLm", "Nemotron")
PAIRS = [(family, [*CASES][(at + shift) % len(CASES)]) for shift in (0, 2) for at, family in enumerate(FAMILIES)]
NEMOTRON = since("5.13", "Nemotron never calls the configured attention")


@pytest.mark.parametrize(
    ("family", "case"), [pytest.param(*pair, marks=[NEMOTRON] * (pair[0] == "Nemotron")) for pair in PAIRS]
)
def test_as_whole_samples(family: str, case: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if family == "GptOss" else torch.float64  # its experts have no fp64
    model = in_own_dtype(causal_lm(family).to(dtype))
    enable_packing(model)
    samples = CASES[case]
    entries = find_relatives(samples).entries(range(len(samples)))
    assert sorted(each if isinstance(each, int) else each.sample for each in entries) == list(range(len(samples)))
    packs = pack_collate([PackedDataset(samples)[entries]])
    whole = pack_collate([[each] for each in samples])
    assert count_target_tokens(packs) == count_target_tokens(whole)
    assert packs[0]["input_ids"].numel() < sum(pack["input_ids"].numel() for pack in whole) - 32
    loss, found = gradients(model, packs)
    want_loss, want = gradients(model, whole)
    # Rounding alone; the softmax of a softcap is computed in fp32.
    tolerance = {"Gemma2": 1e-6, "GptOss": 5e-6}.get(family, 1e-12)
    assert loss == pytest.approx(want_loss, rel=tolerance)
    for name, gradient in want.items():
        assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max() + 1e-14, name


def test_a_model_that_drops_the_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_new_positions(monkeypatch)
    model = causal_lm("StableLm")
    enable_packing(model)
    samples = CASES["a group"]
    (pack,) = pack_collate([PackedDataset(samples)[find_relatives(samples).entries(range(3))]])
    with pytest.raises(RuntimeError, match="StableLmForCausalLM does not pass segments to"):
        predictions(model, pack)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # Dynamo's own look
def test_graphs_of_whole_samples_are_not_reused() -> None:
    """Two lengths make a graph of any length, which once took branches for full samples."""
    torch._dynamo.reset()
    model = causal_lm("Qwen2", num_hidden_layers=1).double()
    enable_packing(model)
    samples = CASES["a group"]
    packs = pack_collate([PackedDataset(samples)[find_relatives(samples).entries(range(3))]])
    _, want = gradients(model, packs)
    model.model.layers[0].compile(backend="eager")
    gradients(model, pack_collate([samples, CASES["turns"]]))
    _, found = gradients(model, packs)
    assert all((found[name] - each).abs().max() <= 1e-12 * each.abs().max() + 1e-14 for name, each in want.items())


def test_what_positions_tell_of_segments_is_of_one_forward() -> None:
    model = causal_lm("StableLm").double()
    enable_packing(model)
    samples = CASES["a group"]
    (pack,) = pack_collate([PackedDataset(samples)[find_relatives(samples).entries(range(3))]])
    ids, positions = pack["input_ids"], pack["position_ids"]
    alone = model(input_ids=ids, position_ids=positions).logits
    told = model(input_ids=ids, position_ids=positions, segments=pack["segments"], cu_seq_lens_q=pack["cu_seq_lens_q"])
    assert not torch.equal(told.logits, alone)
    assert torch.equal(model(input_ids=ids, position_ids=positions).logits, alone)
    with pytest.raises(ValueError, match="give position_ids too, by name"):
        model(ids, None, positions, segments=pack["segments"])
