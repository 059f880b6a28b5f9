"""The divergence of two heads, against float64 autograd of TRL's generalized_jsd_loss over full logits."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.linear_divergence import HeadInput, linear_divergence, linear_divergence_grad
from odc_kernels.peers import PeerShards, join
from odc_kernels.tiles import SoftmaxTile
from tests.support.place import split

pytestmark = [*place.MARKS, pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")]

# Tokens, words, the student's columns, the teacher's.
SHAPES = [(17, 60, 24, 40), (5, 7, 3, 2), (1, 16, 16, 16), (4, 1, 5, 3), (0, 4, 4, 4), (17, 3, 40, 8)]
CASES = place.matrix(SHAPES, [torch.float32, torch.float16, torch.bfloat16], mixed=[(17, 60, 24, 40)])
BETAS = (0.0, 0.3, 0.5, 1.0)
TILE = SoftmaxTile(t=16, v=16)
SCALES = 0.7, 1.3
# Of fp32's rounding of logits. In 16 bits logits are rounded, and dz.
FORWARD = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
BACKWARD = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def heads(tokens: int, words: int, own: int, theirs: int, dtype: torch.dtype, more: int = 0) -> Matrices:
    """h and the whole weight of the student, and of the teacher, which has `more` words."""
    h, teacher_h = torch.randn(tokens, own), torch.randn(tokens, theirs)
    whole, teacher_whole = torch.randn(words, own) / own**0.5, torch.randn(words + more, theirs) / theirs**0.5
    return tuple(each.to(dtype) for each in (h, whole, teacher_h, teacher_whole))


def oracle(given: Matrices, beta: float, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """D, dh and dW in float64. A teacher's other words don't count."""
    with mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"):
        from trl.experimental.gkd import GKDTrainer
    h, whole, teacher_h, teacher_whole = (each.detach().double() for each in given)
    h.requires_grad_(), whole.requires_grad_()
    logits = SCALES[0] * (h @ whole.T), SCALES[1] * (teacher_h @ teacher_whole[: len(whole)].T)
    divergence = GKDTrainer.generalized_jsd_loss(*logits, beta=beta, reduction="none").sum(-1)
    (divergence * g.double()).sum().backward()
    return divergence.detach(), h.grad, whole.grad


def run(given: Matrices, beta: float, g: torch.Tensor, *, worlds: tuple[int, int] = (2, 2), **how: Any) -> Any:
    """D, dh and what was added to the gradient."""
    h, whole, teacher_h, teacher_whole = given
    rank = worlds[0] // 2
    own = PeerShards.of(split(whole, worlds[0]), shape=whole.shape, rank=rank)
    theirs = PeerShards.of(split(teacher_whole, worlds[1]), shape=teacher_whole.shape, rank=worlds[1] // 2)
    both = {"student": HeadInput(h=h, weight=own, scale=SCALES[0]), "beta": beta}
    both |= {"teacher": HeadInput(h=teacher_h, weight=theirs, scale=SCALES[1]), "chunk": 16, "tile": TILE} | how
    output = linear_divergence(**both)
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    dh, before = torch.full(h.shape, torch.nan, dtype=h.dtype), torch.randn(whole.shape, dtype=wide)
    if wide == torch.float64:  # whose kernels add in fp32 only
        after, first = before.clone(), -(-len(whole) // worlds[0])
        gradient = lambda owner, at, rows: after[owner * first + at :][: len(rows)].add_(rows)  # noqa: E731
        linear_divergence_grad(**both, output=output, g=g.to(wide), gradient=gradient, dh=dh)
        return output.divergence, dh, after - before
    shards = split(before, worlds[0])
    gradient = PeerShards.of(shards, shape=whole.shape, rank=rank)
    linear_divergence_grad(**both, output=output, g=g, gradient=gradient, dh=dh)
    return output.divergence, dh, join(shards) - before


def close(found: Any, want: Any, dtype: torch.dtype) -> None:
    limits = (FORWARD[dtype], *[BACKWARD[dtype]] * 2)
    for name, *each in zip(("D", "dh", "dW"), found, want, limits, strict=True):
        place.close(*each, name, least=0.1)  # divergences of one word are zero in exact arithmetic


@pytest.mark.parametrize("eager", [False, True], ids=["kernel", "eager"])
@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_outputs_and_gradients(world: int, shape: tuple, dtype: torch.dtype, eager: bool) -> None:
    for beta in BETAS if world == 8 else BETAS[1:2]:
        given, g = heads(*shape, dtype), torch.randn(shape[0])
        found = run(given, beta, g, worlds=(world, world), eager=eager)
        close(found, oracle(given, beta, g), dtype)


@pytest.mark.parametrize("beta", BETAS)
def test_in_float64(beta: float) -> None:
    given, g = heads(9, 50, 12, 20, torch.float64), torch.randn(9)
    close(run(given, beta, g, eager=True), oracle(given, beta, g), torch.float64)
    with pytest.raises(ValueError, match="in float64, which is computed in plain torch"):
        run(given, beta, g, eager=False)


@pytest.mark.parametrize("eager", [False, True], ids=["kernel", "eager"])
@pytest.mark.parametrize(("worlds", "more"), [((2, 3), 0), ((3, 1), 12), ((1, 4), 5), ((2, 2), -30)])
def test_heads_that_are_cut_otherwise_or_have_other_words(worlds: tuple, more: int, eager: bool) -> None:
    h, whole, teacher_h, teacher_whole = given = heads(9, 50, 12, 20, torch.float32, more)
    g = torch.randn(9)
    found = run(given, 0.5, g, worlds=worlds, eager=eager)
    if more < 0:  # the last words of the student's don't count
        divergence, dh, dw = oracle((h, whole[:more], teacher_h, teacher_whole), 0.5, g)
        assert (found[2][more:] == 0).all()
        close((*found[:2], found[2][:more]), (divergence, dh, dw), torch.float32)
    else:
        close(found, oracle(given, 0.5, g), torch.float32)


@pytest.mark.parametrize("eager", [False, True], ids=["kernel", "eager"])
@pytest.mark.parametrize("beta", BETAS)
def test_large_logits_and_equal_heads(beta: float, eager: bool) -> None:
    """A word that is next to impossible for one of them counts in a KL divergence by what it costs: up to 160."""
    h, teacher_h = (
        torch.tensor([[80.0, 0.0], [-80.0, 0.0], [1.0, 80.0]]),
        torch.tensor([[0.0, 2.0], [0.0, -90.0], [0.0, 2.0]]),
    )
    whole = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    given, g = (h, whole, teacher_h, whole), torch.tensor([1.0, -2.0, 0.5])
    found, want = run(given, beta, g, eager=eager), oracle(given, beta, g)
    assert want[0].max() > (0.3 if 0 < beta < 1 else 20)
    close(found, want, torch.float32)
    with mock.patch(f"{__name__}.SCALES", (0.7, 0.7)):
        for each in run((h, whole, h, whole), beta, g, eager=eager):
            assert each.abs().max() < 1e-5


@pytest.mark.parametrize("eager", [False, True], ids=["kernel", "eager"])
@pytest.mark.parametrize("beta", BETAS)
def test_a_logit_of_minus_infinity_has_no_part(beta: float, eager: bool) -> None:
    h, g = torch.tensor([[256.0]]).half(), torch.ones(1)
    wholes = [torch.tensor([[-60000.0], [a / 256], [b / 256]]).half() for a, b in ((1, 2), (2, 1))]  # beyond fp16
    divergence, dh, dw = run((h, wholes[0], h, wholes[1]), beta, g, eager=eager)
    want = oracle((h, wholes[0][1:], h, wholes[1][1:]), beta, g)
    assert dw[0] == 0
    assert dh.isfinite().all()
    close((divergence, want[1], dw[1:]), want, torch.float16)


def test_what_is_frozen_gets_no_gradient() -> None:
    given, g = heads(7, 20, 4, 6, torch.float32), torch.randn(7)
    h, whole, teacher_h, teacher_whole = given
    student = HeadInput(h=h, weight=PeerShards.local(whole), scale=SCALES[0])
    both = {
        "student": student,
        "teacher": HeadInput(h=teacher_h, weight=PeerShards.local(teacher_whole), scale=SCALES[1]),
    }
    output, (_, want, _) = linear_divergence(**both), oracle(given, 0.5, g)
    dh = torch.full(h.shape, torch.nan)
    linear_divergence_grad(**both, output=output, g=g, gradient=None, dh=dh)
    torch.testing.assert_close(dh.double(), want, rtol=1e-5, atol=1e-6)
    linear_divergence_grad(**both, output=output, g=g, gradient=None, dh=None)
