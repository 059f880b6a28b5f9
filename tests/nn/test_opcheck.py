"""Every custom operator: torch's own checks of it, and its results and gradients against plain torch's."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from odc_triton import fully_shard, minibatch
from odc_triton import nn as odc_nn
from odc_triton.nn.functional import embedding, linear, qkv, token_log_probs
from odc_triton.nn.functional.qkv import HeadNorm
from odc_triton.nn.verification import LocalShards
from tests.support import slow

OPS = torch.ops.odc
N, K, HEAD_DIM = 7, 8, 16
LINEAR = [
    "eager/gathered/split",
    "eager/direct/fused",
    "eager/staged/split",
    "triton/gathered/split",
    "triton/direct/fused",
    "triton/direct/split",
    "triton/staged/fused",
]
EMBEDDING = ["eager/gathered/split", "eager/direct/fused", "triton/gathered/fused", "triton/direct/fused"]
QKV = ["triton/gathered/split", "triton/direct/fused"]
HEAD = ["eager", "triton"]
BF16 = torch.bfloat16
IDS = [torch.tensor([1, 6, 1]), torch.tensor([[0, 3], [3, 5]]).int().T, torch.zeros(0).long()]

# Of the largest value. fp32: sums in another order. bf16: results are rounded to 8 bits, the interpreter cuts off where
# a GPU rounds, and gradients pass through rounded values.
TOLERANCE = {torch.float32: 1e-5, BF16: 2**-5}

CHECKS = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}


def check(operator: torch._ops.OpOverload, *args: object) -> None:
    with warnings.catch_warnings():
        # opcheck gives its compiler inputs that are no leaves, and the compiler looks at their gradients (torch 2.15).
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        assert torch.library.opcheck(operator, args) == dict.fromkeys(CHECKS, "SUCCESS")


def parameter(*shape: int, dtype: torch.dtype = torch.float32, trains: bool = True) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) / 2).to(dtype), requires_grad=trains)


@contextlib.contextmanager
def handles(*parameters: torch.Tensor, world: int = 2, by_kernels: bool = False) -> Iterator[list[torch.Tensor]]:
    """Handles of the parameters, whose rows lie on `world` owners meanwhile."""
    with ExitStack() as stack:
        for each in parameters:
            stack.enter_context(LocalShards(each, world, by_kernels=by_kernels))
        yield [each._odc_handle for each in parameters]


def attention(kind: str, dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The parameters of two heads of q and one of k and v, and the norms' weights, by name."""
    rows = {"q": 2 * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
    options = {"dtype": dtype, "trains": "frozen" not in kind}
    parameters = {f"w{letter}": parameter(count, 24, **options) for letter, count in rows.items()}
    if "bias" in kind:
        parameters |= {f"b{letter}": parameter(count, **options) for letter, count in rows.items()}
    norms = {name: parameter(HEAD_DIM, dtype=dtype) for name in ("q_norm", "k_norm") if "norm" in kind}
    return parameters, norms


def test_all_operators_are_in_this_file() -> None:
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("odc::")}
    both = ("linear", "embedding", "qkv", "token_log_probs")
    assert ours == {"odc::whole_weight", *(f"odc::{name}{kind}" for name in both for kind in ("", "_grad"))}


# ------------------------------------------------------------------ torch's checks


@pytest.mark.parametrize(
    "choice",
    [
        *(LINEAR[0], "triton/staged/fused, bf16"),
        *map(slow, [*LINEAR[1:], "eager, bf16", "triton/direct/fused, bf16"]),
    ],
)
def test_linear(choice: str) -> None:
    choice, _, dtype = choice.partition(", ")
    dtype = BF16 if dtype else torch.float32
    weight, bias = parameter(N, K, dtype=dtype), parameter(N, dtype=dtype)
    with handles(weight, bias, by_kernels=choice.startswith("triton")) as (w, b):
        for shape, biased in (((2, 3, K), True), ((0, K) if "split" in choice else (5, K), False)):
            x, dy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], N, dtype=dtype)
            bias_and_handles = (bias, w, b) if biased else (None, w, None)
            check(OPS.linear.default, x.requires_grad_(), weight, *bias_and_handles, choice)
            check(OPS.linear_grad.default, dy, x.detach(), *bias_and_handles[1:], K, True, True, biased, choice)


@pytest.mark.parametrize("trains", ["w", "xb", *map(slow, ["x", "b", ""])])
def test_linear_of_which_some_is_frozen(trains: str) -> None:
    """And x and dy that are not contiguous, or one row; of four owners one has a row less."""
    weight, bias = parameter(N, K, trains="w" in trains), parameter(N, trains="b" in trains)
    needs = [letter in trains for letter in "xwb"]
    with handles(weight, bias, world=4) as (w, b):
        for choice, x in (
            ("eager", torch.randn(3, 2, K).transpose(0, 1)),
            ("eager/direct/fused", torch.randn(K)),
            ("triton/direct/fused", torch.randn(K, 2).T),
        ):
            x.requires_grad_("x" in trains)
            check(OPS.linear.default, x, weight, bias, w, b, choice)
            saved, dy = x.detach() if "w" in trains else None, torch.randn(N, *x.shape[:-1]).movedim(0, -1)
            check(OPS.linear_grad.default, dy, saved, w, b, K, *needs, choice)


@pytest.mark.parametrize("choice", [EMBEDDING[0], "triton, bf16", *map(slow, [*EMBEDDING[1:], "eager, bf16"])])
def test_embedding(choice: str) -> None:
    choice, _, dtype = choice.partition(", ")
    dtype = BF16 if dtype else torch.float32
    weight = parameter(N, K, dtype=dtype)
    with handles(weight, by_kernels=choice.startswith("triton")) as (w,):
        for ids, padding_idx in zip(IDS, (None, 3, 0), strict=True):
            check(OPS.embedding.default, ids, weight, w, padding_idx, choice)
            check(OPS.embedding_grad.default, torch.randn(*ids.shape, K, dtype=dtype), ids, w, padding_idx, choice)


@pytest.mark.parametrize(
    ("kind", "choice", "dtype"),
    [
        ("", QKV[0], torch.float32),
        ("norm, bias", QKV[1], torch.float32),
        ("bias, frozen", QKV[0], BF16),
    ],
)
def test_qkv(kind: str, choice: str, dtype: torch.dtype) -> None:
    parameters, norms = attention(kind, dtype)
    x = torch.randn(3, 24).to(dtype)
    rope = (*torch.randn(2, 3, HEAD_DIM), torch.arange(3))
    norm = list(norms.values()) or [None, None]
    with handles(*parameters.values(), by_kernels="direct" in choice) as named:
        args = (x.requires_grad_(), list(parameters.values()), named, *norm, 1e-6, *rope, HEAD_DIM, choice)
        check(OPS.qkv.default, *args)
        with torch.no_grad():
            *heads, q_pre, k_pre = OPS.qkv(*args)
            norm = [None if each is None else each.detach() for each in norm]
        check(OPS.qkv_grad.default, *heads, x.detach(), named, *norm, 1e-6, *rope, q_pre, k_pre, choice)


@pytest.mark.parametrize("choice", ["eager", "triton, bf16", *map(slow, ["triton", "eager, bf16"])])
def test_token_log_probs(choice: str) -> None:
    choice, _, dtype = choice.partition(", ")
    dtype = BF16 if dtype else torch.float32
    weight = parameter(N, K, dtype=dtype)
    with handles(weight, by_kernels=choice == "triton") as (w,):
        for tokens, handle in ((4, w), (4, None), (0, w)):  # None: a head that is not sharded
            h, targets = torch.randn(tokens, K, dtype=dtype), torch.tensor([-100, 0, 6, 3])[:tokens]
            rest = (-100, 0.5, choice)
            check(OPS.token_log_probs.default, h.requires_grad_(), weight, handle, targets, *rest)
            with torch.no_grad():
                saved = OPS.token_log_probs(h, weight, handle, targets, *rest)
            own = weight.detach() if handle is None else None
            for g_entropy, *needs in ((None, True, True), (torch.randn(tokens), True, False)):
                args = (h.detach(), own, handle, targets, *saved, torch.randn(tokens), g_entropy, *needs, *rest)
                check(OPS.token_log_probs_grad.default, *args)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_whole_weight(dtype: torch.dtype) -> None:
    for weight in (parameter(N, K, dtype=dtype), parameter(N, dtype=dtype, trains=False), parameter(0, K)):
        with handles(weight) as (w,):
            check(OPS.whole_weight.default, weight, w)
            assert torch.equal(OPS.whole_weight(weight, w), weight)


class Layers(nn.Module):
    """One of each; the second places are generic ones, so no weight is without memory: opcheck clones its arguments,
    and a clone of such a tensor ends the process.
    """

    def __init__(self, choice: str) -> None:
        super().__init__()
        self.linear, self.table = odc_nn.Linear(K, N, choice=choice), odc_nn.Embedding(N, K, choice=choice)
        self.head = odc_nn.LMHead(K, N, choice=choice)
        self.places = nn.ParameterList([*self.linear.parameters(), self.table.weight, self.head.weight])


@pytest.mark.parametrize("choice", ["eager", "triton/direct/fused"])
@pytest.mark.parametrize("backend", ["cpu", "cpu-interpreter"])
def test_on_what_fully_shard_makes(backend: str, choice: str) -> None:
    """A world of one. The gradients' operators run inside a backward, as the engine refuses them elsewhere."""
    if backend == "cpu":
        choice = choice.replace("triton", "eager")  # shards side by side are not aligned for kernels
    model = fully_shard(Layers(choice), backend=backend)
    ids, targets, checked = torch.tensor([1, 6, 1]), torch.tensor([0, -100, 6]), []
    with minibatch(model, tokens=1):
        model.unshard()
        x = torch.randn(3, K, requires_grad=True)
        # Not the leaves themselves: opcheck asks autograd.grad for their gradients, which is refused.
        weight, bias, table, head = (each.detach().clone().requires_grad_() for each in model.places)
        w, b, t, h = (each._odc_handle for each in model.places)
        rest = (-100, 1.0, choice)
        check(OPS.linear.default, x, weight, bias, w, b, choice)
        check(OPS.embedding.default, ids, table, t, None, choice)
        check(OPS.token_log_probs.default, x, head, h, targets, *rest)
        check(OPS.whole_weight.default, table, t)
        saved = OPS.token_log_probs(x.detach(), head.detach(), h, targets, *rest)

        def in_backward(_: torch.Tensor) -> None:
            y, rows, detached = torch.randn(3, N), torch.randn(3, K), x.detach()
            with torch.no_grad():
                check(OPS.linear_grad.default, y, detached, w, b, K, True, True, True, choice)
                check(OPS.embedding_grad.default, rows, ids, t, None, choice)
                args = (detached, None, h, targets, *saved, torch.ones(3), None, True, True, *rest)
                check(OPS.token_log_probs_grad.default, *args)
            checked.append(True)

        y = linear(x, *model.places[:2], choice=choice)
        y.register_hook(in_backward)
        others = model.places[2].sum() + model.places[3].sum()  # a backward adds to what it has in its graph
        (y.sum() + 0 * others).backward()
    assert checked
    assert all(each.grad.to_local().norm() > 0 for each in model.parameters())


# ------------------------------------------------------------------ against plain torch


def close(name: str, got: torch.Tensor | None, want: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert (got is None) == (want is None), name
    if want is None:
        return
    assert got.isfinite().all(), f"{name}: unwritten elements"
    scale = float(want.detach().abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(
        got.double(), want.double(), rtol=0, atol=TOLERANCE[dtype] * scale, msg=lambda text: f"{name}: {text}"
    )


def same(
    ours: Callable[..., tuple[torch.Tensor, ...]],
    torchs: Callable[..., tuple[torch.Tensor, ...]],
    free: dict[str, torch.Tensor],
    on_owners: dict[str, nn.Parameter],
    *,
    by_kernels: bool,
    world: int = 3,
) -> None:
    """`ours` on parameters on their owners against `torchs` in float64: results, and gradients by name, twice."""
    everything = free | on_owners
    dtype = next(iter(on_owners.values())).dtype
    wide = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in everything.items()}
    with ExitStack() as stack:
        shards = {
            name: stack.enter_context(LocalShards(value, world, by_kernels=by_kernels))
            for name, value in on_owners.items()
        }
        for _ in range(2):  # gradients add up
            got, want = ours(**everything), torchs(**wide)
            for index, (result, expected) in enumerate(zip(got, want, strict=True)):
                assert result.shape == expected.shape
                close(f"result {index}", result, expected, dtype)
            gradients = [torch.randn(result.shape).to(result.dtype) for result in got]
            torch.autograd.backward(got, gradients)
            torch.autograd.backward(want, [gradient.double() for gradient in gradients])
    for name, value in free.items():
        close(f"gradient of {name}", value.grad, wide[name].grad, dtype)
    for name, value in on_owners.items():
        assert value.grad is None, f"{name}: autograd has what its owners have"
        close(f"gradient of {name}", shards[name].gradient, wide[name].grad, dtype)


@pytest.mark.parametrize(
    ("dtype", "by_kernels"), [(torch.float32, True), (torch.float32, False), (BF16, True)], ids=str
)
@pytest.mark.parametrize("choice", LINEAR)
def test_gradients_of_linear(choice: str, by_kernels: bool, dtype: torch.dtype) -> None:
    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        return (linear(x, weight, bias, choice=choice),)

    for shape, trains in (((5, K), "wb"), ((2, 3, K), "w"), ((2, 0, K), "wb"), ((3, K), "b"), ((K,), "")):
        on_owners = {"weight": parameter(N, K, dtype=dtype, trains="w" in trains)}
        if trains != "w":
            on_owners["bias"] = parameter(N, dtype=dtype, trains="b" in trains)
        x = torch.randn(shape).to(dtype).requires_grad_()
        same(ours, lambda **by_name: (F.linear(*by_name.values()),), {"x": x}, on_owners, by_kernels=by_kernels)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("choice", EMBEDDING)
def test_gradients_of_embedding(choice: str, by_kernels: bool, dtype: torch.dtype) -> None:
    for ids, padding_idx in zip(IDS, (None, 3, 0), strict=True):
        same(
            lambda weight: (embedding(ids, weight, padding_idx=padding_idx, choice=choice),),  # noqa: B023
            lambda weight: (F.embedding(ids, weight, padding_idx),),  # noqa: B023
            {},
            {"weight": parameter(N, K, dtype=dtype)},
            by_kernels=by_kernels,
        )


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    turn = torch.complex(cos[..., None, :half].double(), sin[..., None, :half].double())
    turned = torch.complex(heads[..., :half], heads[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("choice", ["eager", *QKV])
@pytest.mark.parametrize(
    ("kind", "dtype", "by_kernels"),
    [
        ("bias", torch.float32, True),
        ("norm", torch.float32, False),
        ("norm", BF16, True),
        ("norm, frozen", torch.float32, True),
        slow("bias", BF16, True),
    ],
    ids=str,
)
def test_gradients_of_qkv(kind: str, choice: str, by_kernels: bool, dtype: torch.dtype) -> None:
    parameters, norms = attention(kind, dtype)
    x = torch.randn(2, 5, 24).to(dtype).requires_grad_()
    cos, sin = torch.randn(2, 1, 5, HEAD_DIM // 2).to(dtype).repeat(1, 1, 1, 2)  # halves alike, as rotary tables are

    def ours(x: torch.Tensor, q_norm: Any = None, k_norm: Any = None, **by_name: torch.Tensor) -> tuple:
        norm = None if q_norm is None else HeadNorm(q_weight=q_norm, k_weight=k_norm, eps=1e-6)
        weights, biases = ([by_name.get(kind + letter) for letter in "qkv"] for kind in "wb")
        biases = None if None in biases else biases
        return qkv(x, weights, biases, cos, sin, head_dim=HEAD_DIM, norm=norm, choice=choice)

    def torchs(x: torch.Tensor, **by_name: torch.Tensor) -> tuple:
        heads = []
        for letter in "qkv":
            each = F.linear(x, by_name[f"w{letter}"], by_name.get(f"b{letter}")).unflatten(-1, (-1, HEAD_DIM))
            if f"{letter}_norm" in by_name:
                each = F.rms_norm(each, (HEAD_DIM,), by_name[f"{letter}_norm"], 1e-6)
            heads.append(each if letter == "v" else _rotated(each, cos, sin))
        return tuple(heads)

    same(ours, torchs, {"x": x} | norms, parameters, by_kernels=by_kernels)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("choice", HEAD)
def test_gradients_of_token_log_probs(choice: str, dtype: torch.dtype) -> None:
    targets = torch.tensor([[-100, 0, 6], [3, 3, 5]])

    def torchs(h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = F.log_softmax(0.5 * h @ weight.T, -1)
        picked = logp.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return picked.masked_fill(targets < 0, 0), -(logp.exp() * logp).sum(-1)

    def ours(h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_log_probs(h, weight, targets, scale=0.5, choice=choice)

    h = torch.randn(2, 3, K).to(dtype).requires_grad_()
    same(ours, torchs, {"h": h}, {"weight": parameter(N, K, dtype=dtype)}, by_kernels=choice == "triton")
