"""The fused head: loss, log-probabilities and every gradient against the logits' own, in transformers' models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from odc_triton import log_probs
from odc_triton.hf import summed_loss
from odc_triton.nn import LMHead
from odc_triton.nn.functional import token_log_probs
from odc_triton.nn.head import FusedLogits
from odc_triton.nn.replace import replace_layers
from tests.support.families import causal_lm
from tests.support.gradients import assert_same_gradients, gradients_of

MODELS = ("Llama", "Qwen2", "Qwen2, tied", "Qwen3", "Granite", "GPT2")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return causal_lm(name)


def both(name: str) -> tuple[nn.Module, nn.Module]:
    plain = build(name)
    fused = copy.deepcopy(plain)
    assert replace_layers(fused, roles=["head"], verbose=False).swapped["head"] == ["lm_head"]
    return plain, fused


@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_loss(name: str) -> None:
    plain, fused = both(name)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    ids = torch.randint(1, 97, (2, 19))
    labels = ids.masked_fill(torch.rand(2, 19) < 0.3, -100)
    losses = [model(input_ids=ids, labels=labels, use_cache=False).loss for model in (plain, fused)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)  # fp32, in another order
    assert_same_gradients(gradients_of(fused), gradients_of(plain))


def test_a_summed_loss_of_some_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as users have it: the default on CPUs is plain torch
    plain, fused = both("Qwen2")
    ids = torch.randint(1, 97, (1, 23))
    pack = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(1, 23) < 0.5, -100)}
    for model in (plain, fused):
        summed_loss(model, pack).backward()
    assert_same_gradients(gradients_of(fused), gradients_of(plain))


@pytest.mark.parametrize("training", [True, False])
def test_log_probs_and_entropy(training: bool) -> None:
    """As an RL loss takes them: of the policy in training, of a reference in evaluation, where logits are made."""
    plain, fused = both("Qwen3")
    plain.train(training)
    fused.train(training)
    ids = torch.randint(1, 97, (2, 11))
    targets = ids.roll(-1, 1).masked_fill(torch.arange(11) == 10, -100)
    weight, weight_entropy = torch.randn(2, 11), torch.randn(2, 11)
    log_p = plain(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    want = log_p.gather(-1, targets.clamp_min(0)[..., None])[..., 0].masked_fill(targets < 0, 0.0)
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    (weight * want + weight_entropy * want_entropy).sum().backward()
    for model in (plain, fused):  # the plain one's gradients are not looked at again
        logits = model(input_ids=ids, use_cache=False).logits
        got = log_probs(logits, targets)
        torch.testing.assert_close(got.logp, want, rtol=1e-5, atol=1e-5)  # fp32, in another order
        torch.testing.assert_close(got.entropy, want_entropy, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"targets are \(2, 10\)"):
        log_probs(plain(input_ids=ids).logits, targets[:, 1:])
    (weight * got.logp + weight_entropy * got.entropy).sum().backward()
    assert_same_gradients(gradients_of(fused), gradients_of(plain))


H, W = torch.randn(2, 5, 4), torch.randn(7, 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z[:, :-1],
        lambda z: z[..., :-1, :],
        lambda z: z[0],
        lambda z: z[:, 2],
        lambda z: z[torch.tensor([[True, False, True, True, False]] * 2)],
        lambda z: z[:, torch.tensor([3, 0])],
        lambda z: z.view(-1, 7),
        lambda z: z.reshape((10, 7)),
        lambda z: z.view(5, 2, -1),
        lambda z: z.flatten(0, 1),
        lambda z: z[:1].squeeze(0),
        lambda z: (z / 2.0).float() * 3,
        lambda z: z.to(torch.float32).contiguous(),
        lambda z: z.to("cpu:0"),  # the same device by another name, as "cuda" is
        lambda z: 2 * z,
    ],
)
def test_the_same_logits_of_other_tokens(change: Callable) -> None:
    want = change(H @ W.T)
    got = change(FusedLogits(H, W))
    assert got.shape == want.shape
    assert (got.size(-1), got.dim(), got.ndim, len(got)) == (7, want.ndim, want.ndim, len(want))
    targets = torch.randint(0, 7, want.shape[:-1])
    logp = want.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(got.log_probs(targets).logp, logp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy(reduction: str) -> None:
    targets = torch.tensor([1, -100, 6, 0, 3])
    want = F.cross_entropy(H[0] @ W.T, targets, reduction=reduction)
    torch.testing.assert_close(F.cross_entropy(FusedLogits(H[0], W), targets, reduction=reduction), want)
    torch.testing.assert_close(nn.CrossEntropyLoss(reduction=reduction)(FusedLogits(H[0], W), targets), want)


@pytest.mark.parametrize(
    "touch",
    [
        lambda z: z + 1,
        lambda z: z.softmax(-1),
        lambda z: torch.softmax(z, -1),
        lambda z: z[..., 0],
        lambda z: z[0, 0, 0],
        lambda z: z.view(-1),
        lambda z: z.to(torch.bfloat16),
        lambda z: z.data,
        lambda z: F.cross_entropy(z[0], torch.zeros(5, dtype=torch.long), label_smoothing=0.1),
        lambda z: F.cross_entropy(z[0], torch.randn(5, 7)),
        lambda z: F.cross_entropy(z, torch.zeros(2, 7, dtype=torch.long)),
    ],
)
def test_touching_them_raises(touch: Callable) -> None:
    with pytest.raises(RuntimeError, match=r"does not compute\. Use the model's own loss"):
        touch(FusedLogits(H, W))


def test_a_weight_that_changed_before_the_backward_is_noticed() -> None:
    head = LMHead(4, 7)
    loss = F.cross_entropy(head(H[0]), torch.zeros(5, dtype=torch.long))
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Scaled(nn.Linear):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(h)


def test_another_head_is_left_alone(capsys: pytest.CaptureFixture) -> None:
    model = build("Llama")
    model.lm_head.__class__ = Scaled
    replaced = replace_layers(model, roles="head")
    assert replaced.swapped == {"head": []}
    assert "no plain Linear" in replaced.left["lm_head"]
    assert "left alone: lm_head" in capsys.readouterr().out
    biased = build("Llama")
    biased.lm_head = nn.Linear(32, 97)
    assert replace_layers(biased, roles=["head"], verbose=False).left == {"lm_head": "it has a bias"}
    assert (
        "it is torch.float64" in replace_layers(build("Llama").double(), roles=["head"], verbose=False).left["lm_head"]
    )
    assert "no output embeddings" in str(replace_layers(nn.Linear(2, 2), roles=["head"], verbose=False))
    with pytest.raises(ValueError, match=r"roles \['haed'\] are not known; known are attention, head"):
        replace_layers(model, roles=["haed"])


def test_a_head_sharded_apart_from_its_tied_embedding_is_refused() -> None:
    from odc_triton import fully_shard

    model = build("Qwen2, tied")
    replace_layers(model, roles=["head"], verbose=False)
    fully_shard(model.lm_head, backend="cpu-sharded")
    with pytest.raises(NotImplementedError, match=r"model\.embed_tokens\.weight is tied to a weight that was sharded"):
        fully_shard(model, backend="cpu-sharded")


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        (torch.tensor([4, 97]), IndexError, "target 97 is outside the vocabulary of 97; ignored is -100"),
        (torch.tensor([4, -1]), IndexError, "target -1 is outside the vocabulary of 97"),
        (
            torch.tensor([4.0, 5.0]),
            ValueError,
            r"targets are \(2,\) of torch.float32; with \(2, .*give \(2,\) of torch.int64",
        ),
        (torch.tensor([True, False]), ValueError, r"targets are \(2,\) of torch.bool"),
        (torch.tensor([4, 97], dtype=torch.int32), IndexError, "target 97 is outside the vocabulary of 97"),
        (torch.tensor([[4, 5]]), ValueError, r"targets are \(1, 2\)"),
    ],
)
def test_log_probs_of_no_words(targets: torch.Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        log_probs(torch.zeros(2, 97), targets)
    with pytest.raises(error, match=words):
        token_log_probs(torch.zeros(2, 3), torch.zeros(97, 3), targets)


def test_log_probs_of_other_integers_and_tensors() -> None:
    logits, targets = torch.randn(2, 3, 97), torch.tensor([[5, 6, 7], [8, -100, 9]])
    want = log_probs(logits, targets).logp
    for dtype in (torch.int32, torch.int16, torch.int8):
        torch.testing.assert_close(log_probs(logits, targets.to(dtype)).logp, want, rtol=0, atol=0)
        h, weight = torch.randn(2, 3, 4), torch.randn(97, 4)
        fused = [token_log_probs(h, weight, given) for given in (targets.to(dtype), targets)]
        torch.testing.assert_close(fused[0], fused[1], rtol=0, atol=0)
    mapped = torch.func.vmap(lambda of, words: log_probs(of, words).logp)(logits, targets)
    torch.testing.assert_close(mapped, want)
    assert log_probs(logits.to("meta"), targets.to("meta")).logp.shape == (2, 3)
    with FakeTensorMode() as mode:
        fake = log_probs(mode.from_tensor(logits), mode.from_tensor(targets))
    assert fake.logp.shape == (2, 3)
