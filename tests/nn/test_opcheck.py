"""Every custom operator: torch's own checks of it. Results and gradients: test_functions.py."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from odc_triton import fully_shard, minibatch
from odc_triton import nn as odc_nn
from odc_triton.nn.functional import linear
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
BF16 = torch.bfloat16
IDS = [torch.tensor([1, 6, 1]), torch.tensor([[0, 3], [3, 5]]).int().T, torch.zeros(0).long()]

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
    rope, norm = [*torch.randn(2, 3, HEAD_DIM), torch.arange(3)], list(norms.values())
    with handles(*parameters.values(), by_kernels="direct" in choice) as named:
        args = (x.requires_grad_(), list(parameters.values()), named, norm, 1e-6, rope, HEAD_DIM, choice)
        check(OPS.qkv.default, *args)
        with torch.no_grad():
            *heads, q_pre, k_pre = OPS.qkv(*args)
            norm = [each.detach() for each in norm]
        check(OPS.qkv_grad.default, *heads, x.detach(), named, norm, 1e-6, rope, q_pre, k_pre, choice)


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
