"""The models whose layers are measured: numbers of their configurations, nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A weight [rows, columns] = [N, K], named after the projections of that shape."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """`heads` of q, `kv_heads` of k and v, `head_dim` elements each; `qkv_bias`: whether q, k, v have one."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    blocks: int
    qkv_bias: bool
    tied: bool

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
        """The distinct shapes among them: layers of one shape are measured once, as "gate, up"."""
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


MODELS = {
    model.name: model
    for model in (
        Model(
            name="llama-3-8b",
            hidden=4096,
            intermediate=14336,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=128256,
            blocks=32,
            qkv_bias=False,
            tied=False,
        ),
        Model(
            name="qwen2.5-1.5b",
            hidden=1536,
            intermediate=8960,
            heads=12,
            kv_heads=2,
            head_dim=128,
            vocabulary=151936,
            blocks=28,
            qkv_bias=True,
            tied=True,
        ),
        Model(
            name="qwen2.5-7b",
            hidden=3584,
            intermediate=18944,
            heads=28,
            kv_heads=4,
            head_dim=128,
            vocabulary=152064,
            blocks=28,
            qkv_bias=True,
            tied=False,
        ),
        Model(
            name="qwen2.5-32b",
            hidden=5120,
            intermediate=27648,
            heads=40,
            kv_heads=8,
            head_dim=128,
            vocabulary=152064,
            blocks=64,
            qkv_bias=True,
            tied=False,
        ),
    )
}

# What is checked where there is no GPU: sizes that neither a tile nor a world divides.
TINY = Model(
    name="tiny",
    hidden=48,
    intermediate=75,
    heads=3,
    kv_heads=1,
    head_dim=16,
    vocabulary=101,
    blocks=1,
    qkv_bias=True,
    tied=False,
)
