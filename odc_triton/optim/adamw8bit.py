"""AdamW with 8-bit states: bitsandbytes' format, rounding and functions, on each rank's own rows.

state1, state2      uint8, split like the parameter: codes of the mean gradient (signed) and of its square (unsigned)
absmax1, absmax2    fp32 [*splits, B]: of each block of 256 codes of a rank's rows, flattened; B: the most of a rank

`splits`: into how many parts each dimension of the mesh splits the rows; so the shape in a checkpoint tells which rows
a block is of. Example: [3, 400] on two ranks has [2, 4]. Rank 0 has 800 codes, in blocks of 256, 256, 256 and 32; rank
1 has 400, in blocks of 256 and 144, and leaves two at 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ..base.environment import quiet_bitsandbytes
from ..base.untyped import untyped
from ..comm.layout import shard_rows

BLOCK = 256
MIN_8BIT_SIZE = 4096
CODES_OF = {"absmax1": "state1", "absmax2": "state2"}
_RUN = 2**24  # elements of one call, in whole blocks: on a GPU it counts in int32, on the CPU it makes fp32 copies


class AdamW8bit(Optimizer):
    """`bitsandbytes.optim.AdamW8bit` for sharded parameters: 2.03 bytes of states per element instead of 8.

    Blocks begin at a rank's first row, so on one rank steps are bitsandbytes' own. Plain tensors are stepped too.

    params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
    min_8bit_size: parameters of fewer elements, over all ranks, have fp32 states.

    Raises ImportError without bitsandbytes, ValueError for an option that it does not have, TypeError for a parameter
    that is not split by rows, or not fp32, bf16 or fp16.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        functional()
        how = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "min_8bit_size": min_8bit_size}
        super().__init__(params, how)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # until it is found to be right
        if asked := [name for name in ("amsgrad", "maximize", "capturable", "differentiable") if group.get(name)]:
            raise ValueError(f"AdamW8bit has no {', '.join(asked)}: leave it out, or use torch.optim.AdamW")
        how = {name: group[name] for name in self.defaults}
        numbers = (how["lr"], how["eps"], how["weight_decay"], *how["betas"])
        if not (all(each >= 0 for each in numbers) and all(beta < 1 for beta in how["betas"])):  # NaN is neither
            raise ValueError(f"AdamW8bit was given {how}: none may be below 0, and betas must be below 1")
        for p in group["params"]:
            _splits(p)
        self.param_groups.append(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's; states of other ranks are quantised again, a collective.

        state_dict: of this class, from any number of ranks.

        Raises ValueError for another optimizer.
        """
        lists = ([p for each in of for p in each["params"]] for of in (state_dict["param_groups"], self.param_groups))
        saved = {p: state_dict["state"].get(number) for number, p in zip(*lists, strict=False)}
        taken = {p: _taken(p, states) for p, states in saved.items() if states}
        super().load_state_dict(state_dict | {"state": {}})  # it would cast states to their parameter's dtype
        self.state.update(taken)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _step(p, self.state[p], group)
        return loss


def _step(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    gradient = untyped(p.grad)
    if gradient.layout != torch.strided:
        raise RuntimeError(f"AdamW8bit takes dense gradients, not {gradient.layout}: build the layer with sparse=False")
    if not state:
        state.update(_new_state(p, is_8bit=p.ndim > 0 and p.numel() >= group["min_8bit_size"]))
    state["step"] += 1
    step, lr, (beta1, beta2), eps = int(state["step"]), float(group["lr"]), group["betas"], group["eps"]
    own = [_own(each) for each in (gradient.contiguous(), p, state["state1"], state["state2"])]
    absmaxes, decay = [_own(state[name]) for name in CODES_OF if name in state], group["weight_decay"]
    maps = [_map(name, p.device) for name in CODES_OF if absmaxes]
    for run, blocks in _runs(len(own[0])):
        g, rows, state1, state2 = (each[run] for each in own)
        if absmaxes:
            args = "adam", g, rows, state1, state2, beta1, beta2, 0.0, 0.0, eps, step, lr, *maps
            functional().optimizer_update_8bit_blockwise(*args, *(each[blocks] for each in absmaxes), decay)
        else:
            args = "adam", g, rows, state1, beta1, eps, step, lr, state2, beta2
            functional().optimizer_update_32bit(*args, weight_decay=decay)


def functional(needed_by: str = "8-bit AdamW") -> Any:
    """bitsandbytes' functions. Raises ImportError with the remedy."""
    quiet_bitsandbytes()
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ImportError(f'{needed_by} needs bitsandbytes; run: pip install "odc-triton[quantize]"') from error
    return bitsandbytes.functional


@cache
def _map(absmax: str, device: torch.device) -> torch.Tensor:
    """The values of the codes that have this absmax."""
    return functional().create_dynamic_map(signed=absmax == "absmax1").to(device)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, flattened, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)


def _runs(elements: int) -> Iterator[tuple[slice, slice]]:
    """The elements of each call, and their blocks."""
    for start in range(0, elements, _RUN):
        stop = min(start + _RUN, elements)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def _new_state(p: torch.Tensor, *, is_8bit: bool) -> dict[str, torch.Tensor]:
    state, dims = {"step": torch.tensor(0.0, dtype=torch.float32)}, count()
    zeros: Any = partial(torch.zeros, device=p.device)
    if isinstance(p, DTensor):
        placements = [Shard(next(dims)) if each.is_shard() else each for each in p.placements]
        zeros = partial(dtensor.zeros, device_mesh=p.device_mesh, placements=placements)
    for absmax, codes in CODES_OF.items():
        state[codes] = torch.zeros_like(p, dtype=torch.uint8 if is_8bit else torch.float32)
        if is_8bit:
            state[absmax] = zeros(absmax_shape(p.shape, _splits(p)), dtype=torch.float32)
    return state


def _taken(p: torch.Tensor, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The states of `p` from those in a state dict, with blocks of its own rows."""
    state, others = _new_state(p, is_8bit="absmax1" in saved), {}
    if saved.keys() != state.keys() or any(saved[codes].shape != p.shape for codes in CODES_OF.values()):
        raise ValueError(f"the state dict has {', '.join(saved)} for {list(p.shape)}: it is not of this AdamW8bit")
    for kind, value in state.items():
        if kind in CODES_OF and saved[kind].shape != value.shape:
            others[kind] = saved[kind].full_tensor() if isinstance(saved[kind], DTensor) else saved[kind]
        else:
            _own(value).copy_(_own(saved[kind]))
    requantise(p, state, saved | others, "")
    return state


def _splits(p: torch.Tensor) -> list[int]:
    """Raises TypeError for a parameter that can't be stepped."""
    placements = p.placements if isinstance(p, DTensor) else ()
    by_rows = all(type(each) is Replicate or each == Shard(0) for each in placements) and p.is_contiguous()
    if not by_rows or p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        what = f"a parameter of size {list(p.shape)} is {p.dtype}, placed {list(placements)}, strides {p.stride()}"
        raise TypeError(f"{what}: AdamW8bit takes fp32, bf16 and fp16, contiguous and split by rows")
    return [untyped(p).device_mesh.size(dim) for dim, each in enumerate(placements) if each.is_shard()]


def _rows(rows: int, splits: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of each rank's; each dimension of the mesh splits the parts of the one before."""
    parts = [(0, rows)]
    for among in splits:
        cuts = [(first, shard_rows(end - first, among, part)) for first, end in parts for part in range(among)]
        parts = [(first + start, first + stop) for first, (start, stop) in cuts]
    return parts


def absmax_shape(shape: Sequence[int], splits: Sequence[int]) -> tuple[int, ...]:
    """Of a parameter of this shape; rank 0 has the most rows."""
    return (*splits, -(-_rows(shape[0], splits)[0][1] * math.prod(shape[1:]) // BLOCK))


def state_bytes(shape: Sequence[int], splits: Sequence[int]) -> int:
    """Bytes of rank 0's states of a parameter of this shape."""
    own = _rows(shape[0], splits)[0][1] * math.prod(shape[1:])
    return 4 + 2 * (own + 4 * -(-own // BLOCK) if math.prod(shape) >= MIN_8BIT_SIZE else 4 * own)


def to_read(p: torch.Tensor, absmax: torch.Tensor, saved: torch.Size) -> torch.Tensor:
    """`absmax`, or a tensor for all that a checkpoint has, if it was saved by another number of ranks."""
    others = saved != absmax.shape and len(saved) > 0 and saved == absmax_shape(p.shape, saved[:-1])
    return torch.empty(saved) if others else absmax


@torch.no_grad()
def requantise(p: torch.Tensor, state: Mapping[str, torch.Tensor], loaded: Mapping[str, Any], prefix: str) -> None:
    """Quantises this rank's codes by its own blocks if `loaded` has the absmax of other ranks' blocks, and says so.

    A value changes by at most one step between two codes of its block.
    """
    names = [name for name in CODES_OF if name in state and loaded[prefix + name].shape != state[name].shape]
    if not names:
        return
    split = isinstance(p, DTensor)
    if not split or not any(p.device_mesh.get_coordinate() or ()):
        words = "8-bit optimizer states were saved by another number of ranks, and are quantised again"
        warnings.warn(f"{words}: values change by up to one step of their codes", stacklevel=2)
    width, start = math.prod(p.shape[1:]), p.__create_chunk_list__()[0].offsets[0] if split else 0
    for name in names:
        codes, absmax, code = _own(state[CODES_OF[name]]), _own(state[name]), _map(name, p.device)
        *splits, most = loaded[prefix + name].shape
        theirs = loaded[prefix + name].to(p.device).view(-1, most)
        begins = torch.tensor([begin for begin, _ in _rows(len(p), splits)], device=p.device) * width
        for run, blocks in _runs(len(codes)):
            places = torch.arange(run.start, run.stop, device=p.device) + start * width
            owners = torch.searchsorted(begins, places, right=True) - 1  # the last of those that begin there has rows
            values = code[codes[run].int()] * theirs[owners, (places - begins[owners]) // BLOCK]
            absmax[blocks] = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK).abs().amax(1)
            values /= absmax[blocks].clamp(min=1e-38).repeat_interleave(BLOCK)[: len(values)]
            # To the nearest code. On the CPU bitsandbytes' function has a table of 2^16 cells, wider than steps near 0.
            codes[run] = torch.bucketize(values, (code[1:] + code[:-1]) / 2).to(torch.uint8)
