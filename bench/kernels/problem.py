"""What the kernels' benchmark knows about an operator, and one problem for it. Decides where operators run.

On the GPU if there is one, else on CPU tensors in Triton's interpreter. Import it before any kernel: jit functions
are created at import. With TRITON_INTERPRET=1 set from outside, a machine with a GPU uses the interpreter too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from odc_kernels.peers import ALL, PeerShards, shards_of

DEVICE = (
    torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")
    else torch.device("cpu")
)
if DEVICE.type == "cpu":
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        # Triton's own jit functions were made for a GPU, and kernels that call them would fail one by one.
        raise RuntimeError("triton was imported without TRITON_INTERPRET=1; set it, or import bench.kernels first")
    os.environ["TRITON_INTERPRET"] = "1"

Run = Callable[[], Any]
# Name of a result, what a kernel computed for it (or a part), what it should be.
Results = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
CHUNK = 2048  # tokens to check at a time: a reference in float64 is four times as large as a result


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A weight [rows, columns] = [N, K], named after the projections of that shape."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Model:
    """`heads` of q, `kv_heads` of k and v, `head_dim` elements each; `qkv_bias`: whether q, k, v have one."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qkv_bias: bool

    def linears(self) -> dict[str, tuple[int, int]]:
        """[N, K] of every linear layer of a block and of the head, by name."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (queries, self.hidden),
            "k": (keys, self.hidden),
            "v": (keys, self.hidden),
            "o": (self.hidden, queries),
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocabulary, self.hidden),
        }

    def layers(self) -> list[Layer]:
        """The distinct shapes among them: layers of the same shape are measured once, as "gate, up"."""
        names: dict[tuple[int, int], list[str]] = {}
        for name, shape in self.linears().items():
            names.setdefault(shape, []).append(name)
        return [Layer(name=", ".join(of), rows=shape[0], columns=shape[1]) for shape, of in names.items()]

    def embedding(self) -> list[Layer]:
        return [Layer(name="embedding", rows=self.vocabulary, columns=self.hidden)]

    def head(self) -> list[Layer]:
        return [Layer(name="head", rows=self.vocabulary, columns=self.hidden)]

    def qkv(self) -> list[Layer]:
        """The three projections together."""
        return [Layer(name="qkv", rows=(self.heads + 2 * self.kv_heads) * self.head_dim, columns=self.hidden)]


# hidden, intermediate, heads, kv_heads, head_dim, vocabulary
MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", 4096, 14336, 32, 8, 128, 128256, qkv_bias=False),
        Model("qwen2.5-1.5b", 1536, 8960, 12, 2, 128, 151936, qkv_bias=True),
        Model("qwen2.5-7b", 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
        Model("qwen2.5-32b", 5120, 27648, 40, 8, 128, 152064, qkv_bias=True),
    )
}
# Checked without a GPU: sizes that neither a tile nor a world divides.
TINY = Model("tiny", 48, 75, 3, 1, 16, 101, qkv_bias=True)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least that one call must do. `link_bytes` go to or from the peers; `peer_bytes` is the resulting traffic of
    the peers' own memory (a sum is read and written there), which here is this GPU's.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0
    peer_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer of one model, seen from rank 0 of `world`, with all shards on this device. Tensors are new random
    numbers in every call: never zeros, on which a GPU runs faster.
    """

    model: Model
    layer: Layer
    tokens: int  # 0 where the operator has none
    world: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def own_rows(self) -> int:
        return -(-self.layer.rows // self.world)

    def tensor(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal random numbers with deviation `scale`, by default in the problem's dtype."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).mul_(scale)

    def weight(self) -> torch.Tensor:
        """[N, K], scaled so that a product with it keeps its input's magnitude."""
        return self.tensor(self.layer.rows, self.layer.columns, scale=self.layer.columns**-0.5)

    def sums(self, *shape: int) -> torch.Tensor:
        """fp32, by default [N, K]: what gradients are added to."""
        return self.tensor(*(shape or (self.layer.rows, self.layer.columns)), dtype=torch.float32)

    def poisoned(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=self.device, dtype=self.dtype)

    def shards(self, whole: torch.Tensor) -> PeerShards:
        """Copies of a whole tensor's rows, each in its owner's memory."""
        parts = shards_of(whole, self.world)
        return PeerShards.of(parts, shape=whole.shape, device=self.device, near=ALL)

    def work(
        self,
        *,
        moved: int,
        reads: bool = False,
        adds: bool = False,
        flops: float = 0.0,
        own: int | None = None,
        remote: int | None = None,
    ) -> Work:
        """The work of a call that reads the weight's shards once, or adds fp32 to each of them once, or both.

        `moved`: elements of its local tensors. `own`, `remote`: rows of the weight, by default all of it.
        """
        size, columns = self.dtype.itemsize, self.layer.columns
        own = self.own_rows if own is None else own
        remote = self.layer.rows - self.own_rows if remote is None else remote
        there = size * reads + 8 * adds  # a sum is read and written in its owner's memory, and crosses the link once
        return Work(
            flops=flops,
            hbm_bytes=moved * size + own * columns * there,
            link_bytes=remote * columns * (size * reads + 4 * adds),
            peer_bytes=remote * columns * there,
        )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A problem's tensors, and what runs on them.

    `run`: one call of ours. `check`: runs it on poisoned or known outputs and yields the results with plain torch's.
    `baselines`: one call each of what it is compared with, by name.
    """

    run: Run
    check: Callable[[], Results]
    baselines: Mapping[str, Run]
    work: Work


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`kernels`: the files of kernels/ that it measures. `has_tokens`: False if only the weight's shape matters.
    `most_tokens`: the most that it is meant for. `reduces`: adds into peers.
    """

    name: str
    kernels: tuple[str, ...]
    layers: Callable[[Model], list[Layer]]
    prepare: Callable[[Problem], Prepared]
    has_tokens: bool = True
    most_tokens: int = 65536
    reduces: bool = False


def by_chunks(
    name: str, run: Run, out: torch.Tensor, given: torch.Tensor, reference: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], Results]:
    """A check of `out`, poisoned first, against the reference of every `CHUNK` tokens of `given`."""

    def check() -> Results:
        out.fill_(torch.nan)
        run()
        for now, of in zip(out.split(CHUNK), given.split(CHUNK), strict=True):
            yield name, now, reference(of)

    return check


def by_owner(whole: torch.Tensor, peers: PeerShards) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rows of a whole tensor, the shard of their owner) for every owner."""
    return list(zip(whole.split([len(shard) for shard in peers.shards]), peers.shards, strict=True))


def copies(buffer: torch.Tensor, peers: PeerShards) -> Run:
    """Copies every shard into the buffer."""

    def run() -> None:
        for rows, shard in by_owner(buffer, peers):
            rows.copy_(shard, non_blocking=True)

    return run


def grown(name: str, peers: PeerShards, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> Results:
    """Every owner's sums, rounded to `dtype`, and its rows of what they should be."""
    for rows, shard in by_owner(want, peers):
        yield name, shard.to(dtype), rows
