"""Every custom operator: torch's own checks of it. Results and gradients: test_functions.py."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from odc_triton.nn.verification import LocalShards

OPS = torch.ops.odc
N, K, HEAD_DIM = 7, 8, 16
BF16 = torch.bfloat16
IDS = [torch.tensor([[1, 6], [2, 1]])[:, 1:], torch.tensor([[0, 3], [3, 5]]).int().T, torch.zeros(0).long()]

CHECKS = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}


def in_dtypes(in_fp32: str, in_bf16: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("choice", "dtype"), [(in_fp32, torch.float32), (in_bf16, BF16)], ids=str)


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
    both = ("linear", "embedding", "qkv", "grouped_linear", "token_log_probs", "token_divergence")
    assert ours == {"odc::whole_weight", *(f"odc::{name}{kind}" for name in both for kind in ("", "_grad"))}


@in_dtypes("eager/gathered/whole", "triton/staged/fused")
def test_linear(choice: str, dtype: torch.dtype) -> None:
    weight, bias = parameter(N, K, dtype=dtype), parameter(N, dtype=dtype)
    with handles(weight, bias, by_kernels=choice.startswith("triton")) as (w, b):
        for shape, biased in (((2, 3, K), True), ((0, K) if "whole" in choice else (5, K), False)):
            x, dy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], N, dtype=dtype)
            bias_and_handles = (bias, w, b) if biased else (None, w, None)
            check(OPS.linear.default, x.requires_grad_(), weight, *bias_and_handles, choice)
            check(OPS.linear_grad.default, dy, x.detach(), *bias_and_handles[1:], K, True, True, biased, choice)


@pytest.mark.parametrize("trains", ["w", "xb"])
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


@in_dtypes("eager/gathered/whole", "triton")
def test_embedding(choice: str, dtype: torch.dtype) -> None:
    weight = parameter(N, K, dtype=dtype)
    with handles(weight, by_kernels=choice.startswith("triton")) as (w,):
        for ids, padding_idx in zip(IDS, (None, 3, 0), strict=True):
            check(OPS.embedding.default, ids, weight, w, padding_idx, choice)
            check(OPS.embedding_grad.default, torch.randn(*ids.shape, K, dtype=dtype), ids, w, padding_idx, choice)


@pytest.mark.parametrize(
    ("kind", "choice", "dtype"),
    [("norm, bias", "triton/direct/fused", torch.float32), ("bias, frozen", "triton/gathered/whole", BF16)],
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


@in_dtypes("eager", "triton/direct/fused")
def test_grouped_linear(choice: str, dtype: torch.dtype) -> None:
    weight, bias = parameter(3, N + 1, K, dtype=dtype), parameter(3, N + 1, dtype=dtype)
    with handles(weight, bias, by_kernels="triton" in choice) as (w, b):
        for offsets, gate in (([0, 2, 2, 5], [7.0, 1.7, 1.0]), ([0, 0, 0, 0], [])):
            offsets = torch.tensor(offsets, dtype=torch.int32)
            x = torch.randn(int(offsets[-1]), K, dtype=dtype)
            args = (offsets, weight, bias, w, b, False, gate, choice)
            check(OPS.grouped_linear.default, x.requires_grad_(), *args)
            with torch.no_grad():
                y, pre = OPS.grouped_linear(x, *args)
            rest = (x.detach(), offsets, pre, w, b, K, True, True, True, False, gate, choice)
            check(OPS.grouped_linear_grad.default, torch.randn_like(y), *rest)


@in_dtypes("eager", "triton")
def test_token_log_probs(choice: str, dtype: torch.dtype) -> None:
    weight = parameter(N, K, dtype=dtype)
    with handles(weight, by_kernels=choice == "triton") as (w,):
        for tokens, handle in ((4, w), (4, None), (0, w)):  # None: a head that is not sharded
            h, targets = torch.randn(tokens, K, dtype=dtype), torch.tensor([-100, 0, 6, 3])[:tokens]
            rest = (-100, 0.5, choice)
            check(OPS.token_log_probs.default, h.requires_grad_(), weight, handle, targets, *rest)
            with torch.no_grad():
                saved = OPS.token_log_probs(h, weight, handle, targets, *rest)
            own = weight.detach() if handle is None else None
            both = ((None, True, True), (torch.randn(tokens), True, False))
            for g_entropy, *needs in both if handle is not None and tokens else both[:1]:
                args = (h.detach(), own, handle, targets, *saved, torch.randn(tokens), g_entropy, *needs, *rest)
                check(OPS.token_log_probs_grad.default, *args)


@in_dtypes("eager", "triton")
def test_token_divergence(choice: str, dtype: torch.dtype) -> None:
    weight, theirs = parameter(N, K, dtype=dtype), parameter(N, 5, dtype=dtype, trains=False)
    with handles(weight, theirs, by_kernels=choice == "triton") as (w, t):
        for tokens, named in ((4, (w, t)), (4, (None, None)), (0, (w, None))):
            h, teacher_h = torch.randn(tokens, K, dtype=dtype), torch.randn(tokens, 5, dtype=dtype)
            rest = (0.3, 0.5, 2.0, choice)
            check(OPS.token_divergence.default, h.requires_grad_(), weight, teacher_h, theirs, *named, *rest)
            with torch.no_grad():
                saved = OPS.token_divergence(h, weight, teacher_h, theirs, *named, *rest)
            own = [each.detach() if of is None else None for each, of in zip((weight, theirs), named, strict=True)]
            for needs in ((True, True), (True, False)) if named[1] is not None else ((True, True),):
                args = (h.detach(), teacher_h, *own, *saved, torch.randn(tokens), *named, *needs, *rest)
                check(OPS.token_divergence_grad.default, *args)


def test_whole_weight() -> None:
    for weight in (parameter(N, K), parameter(N, dtype=BF16, trains=False), parameter(0, K)):
        with handles(weight) as (w,):
            check(OPS.whole_weight.default, weight, w)
            assert torch.equal(OPS.whole_weight(weight, w), weight)
