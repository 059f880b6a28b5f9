"""Logits that are never computed: the result of a fused head in training, for losses and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._C._nn import _parse_to
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .choice import AUTO
from .functional import token_divergence, token_log_probs
from .functional.log_probs import checked_targets

_REMEDY = (
    "Use the model's own loss (labels=...), torch.nn.functional.cross_entropy, or their .log_probs(targets); for "
    "the numbers themselves call model.eval(), or leave the role 'head' out of replace_layers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogProbs:
    """Per token, fp32, with gradients.

    logp: the target's log-probability; 0 where ignored.
    entropy: the distribution's.
    """

    logp: torch.Tensor
    entropy: torch.Tensor


class FusedLogits:
    """Stands for scale · h Wᵀ in a loss: it has the shape and the cross-entropy. A fused head makes it.

    Indexing and reshaping over tokens, `float()`, `to` and a scalar factor return another FusedLogits; any other
    operation would need the logits, so it raises with the remedy.

    h: [..., D].
    weight: [V, D].
    scale: multiplies the logits.
    choice: the operator, as in `replace_layers`.
    """

    def __init__(self, h: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, choice: str = AUTO) -> None:
        if h.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"h is {tuple(h.shape)}; with a head of {tuple(weight.shape)} give [..., {weight.shape[1]}]"
            )
        self._h, self._weight, self._scale, self._choice = h, weight, scale, choice

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self._h.shape[:-1], self._weight.shape[0]])

    @property
    def ndim(self) -> int:
        return self._h.ndim

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32  # the softmax's; the logits would have the compute dtype

    @property
    def device(self) -> torch.device:
        return self._h.device

    @property
    def requires_grad(self) -> bool:
        return self._h.requires_grad or self._weight.requires_grad

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"FusedLogits(shape={tuple(self.shape)}, never computed)"

    def _of(self, h: torch.Tensor, factor: float = 1.0) -> FusedLogits:
        return FusedLogits(h, self._weight, self._scale * factor, self._choice)

    def float(self) -> FusedLogits:
        return self

    contiguous = float

    def to(self, *args: Any, **kwargs: Any) -> FusedLogits:
        kwargs.pop("copy", None)
        device, dtype, _, _ = _parse_to(*args, **kwargs)
        elsewhere = device is not None and torch.empty(0, device=device).device != self.device
        if elsewhere or dtype not in (None, torch.float32):
            raise _refused(f"to({args or kwargs})")
        return self

    def view(self, *shape: Any) -> FusedLogits:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        tokens = self._h.shape[:-1].numel()
        if shape[-1] != self.shape[-1] and not (shape[-1] == -1 and math.prod(shape[:-1]) == tokens):
            raise _refused(f"view{shape}")
        return self._of(self._h.reshape(*shape[:-1], self._h.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> FusedLogits:
        if end_dim % self.ndim == self.ndim - 1:
            raise _refused(f"flatten({start_dim}, {end_dim})")
        return self._of(self._h.flatten(start_dim, end_dim))

    def squeeze(self, dim: int) -> FusedLogits:
        if dim % self.ndim == self.ndim - 1:
            raise _refused(f"squeeze({dim})")
        return self._of(self._h.squeeze(dim))

    def __getitem__(self, index: Any) -> FusedLogits:
        parts = index if isinstance(index, tuple) else (index,)
        taken = sum(_dimensions(part) for part in parts)
        has_ellipsis = any(part is Ellipsis for part in parts)
        if taken >= self.ndim or (has_ellipsis and parts[-1] is not Ellipsis):  # the last part indexes the vocabulary
            whole = isinstance(parts[-1], slice) and parts[-1] == slice(None)
            if not whole or taken > self.ndim:
                raise _refused(f"[{index}]")
        return self._of(self._h[index])

    def __mul__(self, factor: Any) -> FusedLogits:
        if not isinstance(factor, (int, float)):
            raise _refused("a factor that is not a number")
        return self._of(self._h, float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> FusedLogits:
        if not isinstance(divisor, (int, float)):
            raise _refused("a divisor that is not a number")
        return self._of(self._h, 1 / divisor)

    def _needs_logits(self, *_: Any) -> NoReturn:
        raise _refused("an operator on them")

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __rtruediv__ = __matmul__ = __pow__ = _needs_logits
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __iter__ = _needs_logits

    def log_probs(self, targets: torch.Tensor, *, ignore_index: int = -100) -> TokenLogProbs:
        """As `odc_triton.log_probs`: of `targets`, integers of this shape without the vocabulary.

        ignore_index: a target whose log-probability is 0.
        """
        logp, entropy = token_log_probs(
            self._h, self._weight, targets, ignore_index=ignore_index, scale=self._scale, choice=self._choice
        )
        return TokenLogProbs(logp=logp, entropy=entropy)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        if function is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        raise _refused(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"FusedLogits has no {name}")
        raise _refused(name)


# The engine finds tensors in a model's output to detect the begin of its backward; here it finds h.
pytree.register_pytree_node(
    FusedLogits,
    lambda logits: ([logits._h], (logits._weight, logits._scale, logits._choice)),
    lambda parts, of: FusedLogits(next(iter(parts)), *of),
)


def log_probs(logits: torch.Tensor | FusedLogits, targets: torch.Tensor, *, ignore_index: int = -100) -> TokenLogProbs:
    """Log-probabilities of `targets` and the entropy of the distribution, per token.

    logits: [..., V], computed or not: a fused head returns `FusedLogits` in training and, like any other head, numbers
        in evaluation.
    targets: integers [...].
    ignore_index: a target whose log-probability is 0.

    Returns both in fp32, of fp64 logits in fp64.
    """
    if isinstance(logits, FusedLogits):
        return logits.log_probs(targets, ignore_index=ignore_index)
    targets = checked_targets(targets, logits, logits.shape[-1], ignore_index)
    every = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    ignored = targets == ignore_index
    logp = every.gather(-1, targets.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0.0)
    return TokenLogProbs(logp=logp, entropy=-(every.exp() * every).sum(-1))


def divergence(
    student: torch.Tensor | FusedLogits,
    teacher: torch.Tensor | FusedLogits,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The divergence of each token between the distributions of two models. Only the student gets gradients.

    Equal to TRL's `generalized_jsd_loss`. Where one vocabulary is longer, its last words don't count.

    student, teacher: logits [..., V], both computed or neither (`FusedLogits`).
    beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between them Jensen-Shannon of the mixture (1 -
        beta) student + beta teacher.
    temperature: divides the logits.

    Returns a tensor [...], in fp32, or fp64 for logits in fp64. Raises ValueError for other shapes, for logits of which
    one is a fused head's, and for a beta outside 0..1.
    """
    fused = [isinstance(each, FusedLogits) for each in (student, teacher)]
    if fused[0] != fused[1] or student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(
            f"the student's logits are {_described(student)}, the teacher's {_described(teacher)}: give those of the "
            f"same tokens, and replace the role 'head' in both models or in neither"
        )
    if not 0 <= beta <= 1 or not 0 < temperature < math.inf:
        raise ValueError(f"beta is {beta}, temperature {temperature}: give 0 to 1, and a positive number")
    if isinstance(student, FusedLogits) and isinstance(teacher, FusedLogits):
        scales = {"scale": student._scale / temperature, "teacher_scale": teacher._scale / temperature}
        heads = student._h, student._weight, teacher._h, teacher._weight
        return token_divergence(*heads, beta=beta, **scales, choice=student._choice)
    words = min(student.shape[-1], teacher.shape[-1])
    log_p, log_q = (
        (each[..., :words].to(torch.promote_types(each.dtype, torch.float32)) / temperature).log_softmax(-1)
        for each in (student, teacher.detach())
    )
    log_m = log_q if beta == 1 else log_p
    if 0 < beta < 1:
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    found: Any = 0.0 if beta == 1 else (beta or 1.0) * F.kl_div(log_m, log_q, reduction="none", log_target=True).sum(-1)
    if beta:
        found = found + ((1 - beta) or 1.0) * F.kl_div(log_m, log_p, reduction="none", log_target=True).sum(-1)
    return found


def _described(logits: torch.Tensor | FusedLogits) -> str:
    return repr(logits) if isinstance(logits, FusedLogits) else f"a tensor of {tuple(logits.shape)}"


def _cross_entropy(
    input: FusedLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of logits [T, V] or [V] and class indices."""
    if not isinstance(input, FusedLogits) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        raise _refused("cross_entropy with probabilities as targets")
    given = {"weight": weight, "size_average": size_average, "reduce": reduce, "label_smoothing": label_smoothing}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) or value:
            raise _refused(f"cross_entropy with {name}={'a tensor' if isinstance(value, torch.Tensor) else value}")
    if input.ndim > 2:
        raise _refused(f"cross_entropy of {input.ndim} dimensions, with the classes in the second")
    loss = -input.log_probs(target, ignore_index=ignore_index).logp
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if reduction != "mean":
        raise ValueError(f"{reduction} is not a valid value for reduction; give 'none', 'mean' or 'sum'")
    return loss.sum() / (target != ignore_index).sum()


def _dimensions(part: Any) -> int:
    """The number of dimensions that one part of an index addresses."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


def _refused(what: str) -> RuntimeError:
    return RuntimeError(f"{what} would need logits, which the fused head does not compute. {_REMEDY}.")
