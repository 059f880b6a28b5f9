"""Layers in a user's own model, plain and sharded; what they save and hold; replace_layers on torch's modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from odc_triton import fully_shard, minibatch, replace_layers
from odc_triton.nn import Attention, Embedding, Linear, LMHead
from tests.support import ranks, slow
from tests.support.peak_memory import peak_bytes

DIRECT = "eager/direct/fused"
CHOICES = ("auto", "eager/gathered/whole", DIRECT, "staged", "triton/direct/fused")


def _rope(tokens: int, head_dim: int = 16, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(batch, tokens, head_dim // 2).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


class Small(nn.Module):
    """A user's model: a table twice in use, a tied pair, one layer called twice, attention and a head."""

    def __init__(self, choice: str | None) -> None:
        super().__init__()
        own = {"choice": choice} if choice else {}
        linear, table = (Linear, Embedding) if choice else (nn.Linear, nn.Embedding)
        self.table = table(11, 32, padding_idx=-2, **own)
        self.blocks = nn.ModuleList(nn.Sequential(linear(32, 32, **own), nn.Tanh()) for _ in range(2))
        self.twice = linear(32, 32, bias=False, **own)
        self.tied = linear(32, 32, **own)
        self.tied.weight = self.twice.weight
        self.head = LMHead(32, 11, choice=choice if "/" not in choice else choice.split("/")[0]) if choice else None
        if not choice:
            self.head = nn.Linear(32, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids) + self.table(ids.flip(0))
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.tied(self.twice(torch.tanh(self.twice(h)))))


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), ids.roll(1, 0), reduction="sum")


def _close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    # fp32 sums in another order, over ranks, owners and microbatches.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def _own_model(rank: int, world: int, backend: str, choice: str) -> None:
    batches = [torch.randint(0, 11, (size,), generator=torch.Generator().manual_seed(size)) for size in (7, 1, 12, 3)]
    torch.manual_seed(0)
    plain = Small(None)
    model = Small(choice)
    model.load_state_dict(plain.state_dict())
    model = fully_shard(model, backend=backend)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    with torch.inference_mode() if world == 3 else torch.no_grad():  # before any minibatch
        _close(model.eval()(batches[0]), plain(batches[0]), "evaluation")
    for _ in range(2):
        model.train()
        for ids in batches:
            _loss(plain, ids).backward()
        with minibatch(model, tokens=1):
            for ids in batches[:3][rank::world] + batches[3:] * (rank == 0):
                _loss(model, ids).backward()
        for (name, parameter), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            _close(parameter.grad.full_tensor(), want.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                _close(model.eval()(batches[2]), plain(batches[2]), "evaluation after a step")
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("world", "backend", "choices"), [slow(2, "cpu-sharded", CHOICES), (3, "cpu", ("auto", DIRECT))]
)
def test_ones_own_model(world: int, backend: str, choices: tuple[str, ...]) -> None:
    ranks.run_all(world, *((_own_model, backend, choice) for choice in choices))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_shards_they_are_torchs(dtype: torch.dtype) -> None:
    for ours, plain, x in (
        (Linear(5, 3, dtype=dtype, choice=DIRECT), nn.Linear(5, 3, dtype=dtype), torch.randn(2, 4, 5, dtype=dtype)),
        (Linear(5, 3, False, dtype=dtype), nn.Linear(5, 3, False, dtype=dtype), torch.randn(5, 0, dtype=dtype).T),
        (Embedding(7, 5, -1, dtype=dtype), nn.Embedding(7, 5, -1, dtype=dtype), torch.tensor([[6, 0], [6, 0]])),
        (Embedding(7, 5, max_norm=0.1, dtype=dtype), nn.Embedding(7, 5, max_norm=0.1, dtype=dtype), torch.tensor([3])),
    ):
        plain.load_state_dict(ours.state_dict())
        assert repr(ours) == repr(plain)
        outputs = [layer(x) for layer in (ours, plain)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        for (name, got), want in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.grad, want.grad), name


def _plain_attention(
    p: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Softmax of scores by hand. `mask`: [T, T], what is added."""
    q, k, v = (F.linear(x, p[f"{n}_proj.weight"], p.get(f"{n}_proj.bias")).unflatten(-1, (-1, 16)) for n in "qkv")
    if "q_norm.weight" in p:
        q, k = (F.rms_norm(h, (16,), p[f"{n}_norm.weight"], 1e-3) for n, h in (("q", q), ("k", k)))
    q, k = (h * cos[..., None, :] + torch.cat((-h[..., 8:], h[..., :8]), -1) * sin[..., None, :] for h in (q, k))
    k, v = (h.repeat_interleave(q.shape[2] // h.shape[2], 2) for h in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) @ p["o_proj.weight"].T


ATTENTION = {
    "plain": ({}, {}),
    "grouped, all see all": ({"num_kv_heads": 2}, {"is_causal": False}),
    "bias, one head of k": ({"num_kv_heads": 1, "bias": True}, {}),
    "norm": ({"num_kv_heads": 2, "qk_norm": True, "eps": 1e-3}, {}),
    "all, masked": ({"num_kv_heads": 2, "bias": True, "qk_norm": True, "eps": 1e-3}, {"attn_mask": True}),
}


def _attention(rank: int, world: int, backend: str | None, choices: tuple[str, ...]) -> None:
    for choice, (name, (options, call)) in itertools.product(choices, ATTENTION.items()):
        torch.manual_seed(1)
        model = Attention(24, 4, head_dim=16, choice=choice, **options)
        if "qk_norm" in options:
            nn.init.normal_(model.q_norm.weight)
            nn.init.normal_(model.k_norm.weight)
        p = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
        mask = torch.randn(5, 5).masked_fill(torch.rand(5, 5) < 0.3, -1e9) if "attn_mask" in call else None
        added = torch.full((5, 5), -1e9).triu(1) if call.get("is_causal", True) else None
        x, pull = torch.randn(3, 5, 24, requires_grad=True), torch.randn(3, 5, 24)
        twin, tables = x.detach().clone().requires_grad_(), _rope(5, batch=3)
        want = _plain_attention(p, twin, *tables, added if mask is None else mask)
        (want * pull).sum().backward()
        if backend is None:
            got = model(x, *tables, **call | ({} if mask is None else {"attn_mask": mask}))
            (got * pull).sum().backward()
        else:
            model = fully_shard(model, backend=backend)
            with minibatch(model, tokens=1):
                if rank == 0:
                    got = model(x, *tables, **call | ({} if mask is None else {"attn_mask": mask}))
                    (got * pull).sum().backward()
        if rank == 0:
            _close(got, want, name)
            _close(x.grad, twin.grad, f"{name}: x")
        for key, parameter in model.named_parameters():
            grad = parameter.grad if backend is None else parameter.grad.full_tensor()
            # Long sums of numbers of size 10.
            torch.testing.assert_close(
                grad, p[key].grad, rtol=1e-4, atol=1e-4, msg=lambda t, k=key, n=name: f"{n}, {k}: {t}"
            )


def test_attention() -> None:
    _attention(0, 1, None, ("auto", DIRECT, "triton", "triton/direct/fused"))
    ranks.run(_attention, 3, "cpu-sharded", ("auto", DIRECT, "triton/direct/fused"))


def _saved(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        run().sum().backward()
    return found


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("backend", ["cpu", "cpu-sharded"])
def test_what_is_saved(backend: str, choice: str) -> None:
    x, ids = torch.randn(6, 40, requires_grad=True), torch.randint(0, 9, (6,))
    for trains, want in ((True, 6 * 40 * 4), (False, 0)):
        layer = Linear(40, 24, choice=choice)
        layer.weight.requires_grad_(trains)
        layer = fully_shard(layer, backend=backend)
        with minibatch(layer, tokens=1):
            assert _bytes(_saved(lambda: layer(x))) == want  # noqa: B023
    table = fully_shard(Embedding(9, 40, choice=choice), backend=backend)
    with minibatch(table, tokens=1):
        assert _bytes(_saved(lambda: table(ids))) == 6 * 8
    attention = fully_shard(Attention(40, 2, head_dim=16, choice=choice.replace("staged", "auto")), backend=backend)
    x = x.detach().view(1, 6, 40).requires_grad_()
    with minibatch(attention, tokens=1):
        saved = _saved(lambda: attention(x, *_rope(6)))
    assert saved
    weights = {parameter.shape for parameter in attention.parameters()} | {
        p.shape[::-1] for p in attention.parameters()
    }
    assert not weights & {each.shape for each in saved}


def _storages(model: nn.Module) -> dict[str, int]:
    """Bytes that whole parameters hold now, by unit."""
    units = {unit.name: [slot.parameter.leaf for slot in unit.slots] for unit in model._odc_engine.units}
    return {name: sum(leaf.untyped_storage().nbytes() for leaf in leaves) for name, leaves in units.items()}


class Stack(nn.Module):
    def __init__(self, choice: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Linear(96, 96, False, choice=choice) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


MEMORY_CHOICES = ("direct/fused", "staged", "triton/direct/fused", "triton/staged", "gathered")


def _memory(rank: int, world: int, choice: str) -> tuple[list[dict[str, int]], int]:
    model, seen = fully_shard(Stack(choice), backend="cpu-sharded"), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(_storages(model)))
        block.register_full_backward_pre_hook(lambda *_: seen.append(_storages(model)))
    x = torch.randn(2, 96, requires_grad=True)
    with minibatch(model, tokens=1):
        peak = peak_bytes(lambda: model(x).sum().backward())
        seen.append(_storages(model))
    with torch.no_grad():
        model(x)
    return [*seen, _storages(model)], peak


def test_memory_of_weights() -> None:
    weight_bytes = 96 * 96 * 4
    found = ranks.run_all(3, *((_memory, choice) for choice in MEMORY_CHOICES))
    for choice, (seen, peak) in (
        (choice, each) for choice, of in zip(MEMORY_CHOICES, found, strict=True) for each in of
    ):
        most = [max(units.values()) for units in seen]
        whole = [sum(size >= weight_bytes for size in units.values()) for units in seen]
        if choice == "gathered":  # this unit alone, and once the order is known the next one too
            assert whole[:9] == [1] * 8 + [0]
            assert whole[9:] == [2, 2, 2, 1, 0]
        else:
            assert most == [0] * 14
        if "direct" in choice:  # the part of one owner at a time, with room for activations
            assert peak < weight_bytes * 2 / 3
        else:
            assert peak >= weight_bytes


X = torch.randn(2, 3, 32)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Linear(3, 4, choice="fast"), "'fast' is not known here; give 'auto' or some of eager, triton"),
        (lambda: Embedding(3, 4, choice="embedding=staged"), "'staged' is not known here; give 'auto' or some of"),
        (lambda: Attention(32, 4, 3), "4 heads of q can't share 3 of k and v evenly"),
        (lambda: Attention(30, 4), "hidden_size 30 is not a multiple of 4 heads; give head_dim"),
        (lambda: LMHead(4, 7)(torch.randn(2, 5)).log_probs(torch.tensor([1, 1])), r"h is .*\(2, 5\).*\(7, 4\) give"),
        (lambda: LMHead(4, 7)(torch.randn(2, 4)).log_probs(torch.tensor([1])), r"targets are \(1,\).*give \(2,\)"),
        (lambda: LMHead(4, 7).double()(torch.randn(2, 4)).log_probs(torch.tensor([1, 1])), "float64; give float32"),
        (
            lambda: fully_shard(Attention(48, 2, choice="triton"))(torch.randn(1, 3, 48), *_rope(3, 24)),
            "head_dim is 24",
        ),
        # No choice at all, and what is no attention.
        (lambda: Linear(3, 4, choice=None), "choice"),
        (lambda: Attention(32, 4, -2), "-2"),
        (lambda: Attention(33, 3), "head_dim 11"),
        (lambda: Attention(16, 1)(torch.randn(3, 16), *_rope(3)), r"x is \(3, 16\)"),
        (lambda: Attention(32, 2)(X, *_rope(3, 8)), "cos"),
    ],
)
def test_wrong_arguments(wrong: Callable, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        wrong()


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 16, padding_idx=-1)
        self.limited = nn.Embedding(7, 16, max_norm=1.0)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = (
            nn.Sequential(nn.Linear(16, 8), nn.ReLU()),
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 7)),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.encoder(self.table(ids) + self.limited(ids))
        return self.down(self.up(h + self.attention(h, h, h, need_weights=False)[0]))


WHY = {
    "limited": "it has max_norm, scale_grad_by_freq or sparse gradients",
    "encoder.linear1": "part of a TransformerEncoderLayer, which reads its weight without calling it",
    "encoder.linear2": "part of a TransformerEncoderLayer, which reads its weight without calling it",
    "encoder.self_attn.out_proj": "NonDynamicallyQuantizableLinear and no plain Linear",
    "attention.out_proj": "NonDynamicallyQuantizableLinear and no plain Linear",
    "down": "ParametrizedLinear and no plain Linear",
}


def _replaced(rank: int, world: int, choice: str) -> None:
    torch.manual_seed(0)
    plain, model = Torchs(), Torchs()
    model.load_state_dict(plain.state_dict())
    ids = torch.tensor([[0, 6, 1], [2, 2, 6]])
    for number in range(2):
        found = replace_layers(model, choice=choice, verbose=False)
        assert found.swapped == {
            "attention": [],
            "embedding": [["table"], []][number],
            "linear": [["up.0"], []][number],
        }
        assert found.left.keys() == WHY.keys()
        assert all(words in found.left[name] for name, words in WHY.items())
    assert model.state_dict().keys() == plain.state_dict().keys()
    model = fully_shard(model, backend="cpu-sharded")
    with minibatch(model, tokens=1):
        for each, other in ((model, plain),) if rank == 0 else ():
            _close(each(ids), other(ids), "output")
            each(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        _close(got.grad.full_tensor(), want.grad, name)
    with torch.no_grad():
        _close(model.eval()(ids), plain.eval()(ids), "evaluation, by the encoder's fast path")
    with pytest.raises(RuntimeError, match="replace_layers comes before fully_shard"):
        replace_layers(model)


def test_torchs_modules_replaced() -> None:
    ranks.run_all(2, (_replaced, "auto"), (_replaced, "direct"))
