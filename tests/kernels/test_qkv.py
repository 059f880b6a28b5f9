"""qkv and its backward, against the projections of transformers' attention modules and against plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from tests.support import place  # isort: skip

from odc_kernels.peers import ALL, PeerShards, join
from odc_kernels.qkv import qkv, qkv_ref
from odc_kernels.qkv_grad import QkvGradients, qkv_grad, qkv_grad_ref
from odc_kernels.qkv_inputs import QkNorm, QkvWeights, Rope
from odc_kernels.tiles import LinearTile, QkvTile, WgradTile
from tests.support import slow
from tests.support.place import split

pytestmark = place.MARKS

TILE = QkvTile(t=16, k=16, group=2)
DX_TILE = LinearTile(t=16, n=16, k=16)
WGRAD_TILE = WgradTile(n=16, k=32, t=32, group=2)
POSITIONS = 64  # rows of the tables

# Of the largest value. fp32: sums in another order, and transformers' norm is fp32 in its float64 module too. fp16 and
# bf16: gradients pass through one rounded value (that before the norm or the projection's gradient) and are rounded
# themselves; the interpreter cuts fp32 off to bf16 where a GPU rounds, so its errors add up in one direction.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2**-5}


def close(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    place.close(got, want, TOLERANCE[dtype], name, rtol=0)


@dataclass(kw_only=True)
class Layer:
    """A layer's tensors: whole ones in `module` (float64), and the same numbers as shards in the compute dtype."""

    family: str
    heads: tuple[int, int]
    head_dim: int
    module: torch.nn.Module
    x: torch.Tensor
    shards: dict[str, list[torch.Tensor]]
    rope: Rope
    norm: QkNorm | None
    world: int

    @classmethod
    def of(
        cls,
        family: str,
        *,
        tokens: int = 21,
        columns: int = 24,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        world: int = 2,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype = torch.float32,
        table_scale: float = 1.0,
    ) -> Layer:
        sizes = {
            "hidden_size": columns,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": head_dim,
        }
        if family == "llama":
            module = LlamaAttention(config := LlamaConfig(**sizes), 0)
        elif family == "qwen2":
            module = Qwen2Attention(config := Qwen2Config(**sizes), 0)
        else:
            module = Qwen3Attention(config := Qwen3Config(**sizes, attention_bias="bias" in family), 0)
        module.double()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                size = columns**-0.5 if name.endswith("proj.weight") else 1.0
                parameter.copy_((torch.randn_like(parameter) * size).to(dtype))
        norm = None
        if "qwen3" in family:
            q_weight, k_weight = (norm.weight.detach().to(dtype) for norm in (module.q_norm, module.k_norm))
            norm = QkNorm(q_weight=q_weight, k_weight=k_weight, eps=module.q_norm.variance_epsilon)
        shards = {
            kind + letter: split(getattr(getattr(module, f"{letter}_proj"), name).detach().to(dtype), world)
            for letter in "qkv"
            for kind, name in (("w", "weight"), ("b", "bias"))
            if getattr(getattr(module, f"{letter}_proj"), name) is not None
        }
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
        # Two packed documents: positions count from 0 again.
        positions = torch.cat((torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)))
        rope = Rope(
            cos=(cos[0] * table_scale).to(table_dtype).contiguous(),
            sin=(sin[0] * table_scale).to(table_dtype).contiguous(),
            positions=positions,
        )
        return cls(
            family=family,
            heads=heads,
            head_dim=head_dim,
            module=module,
            x=torch.randn(tokens, columns).to(dtype),
            shards=shards,
            rope=rope,
            norm=norm,
            world=world,
        )

    @property
    def has_bias(self) -> bool:
        return "bq" in self.shards

    def peers(self, name: str, shards: list[torch.Tensor], rank: int) -> PeerShards:
        rows = self.heads[0 if name[1] == "q" else 1] * self.head_dim
        return PeerShards.of(shards, shape=(rows, self.x.shape[1]) if name[0] == "w" else (rows,), rank=rank, near=ALL)

    def weights(self, rank: int) -> QkvWeights:
        return QkvWeights(**{name: self.peers(name, shards, rank) for name, shards in self.shards.items()})

    def empty(self) -> dict[str, torch.Tensor]:
        """q, k, v, and with a norm q_pre and k_pre, poisoned."""
        tokens, (q_heads, kv_heads) = self.x.shape[0], self.heads
        sizes = {"q": q_heads, "k": kv_heads, "v": kv_heads} | (
            {"q_pre": q_heads, "k_pre": kv_heads} if self.norm else {}
        )
        return {
            name: torch.full((tokens, count, self.head_dim), torch.nan, dtype=self.x.dtype)
            for name, count in sizes.items()
        }

    def forward(self, rank: int, tile: QkvTile | None = TILE) -> dict[str, torch.Tensor]:
        out = self.empty()
        qkv(x=self.x, weights=self.weights(rank), rope=self.rope, norm=self.norm, **out, tile=tile)
        return out

    def by_transformers(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """q, k, v as the module's forward makes them up to its attention, as [T, heads, D]."""
        module, shape = self.module, (1, x.shape[0], -1, self.head_dim)
        q, k, v = (getattr(module, f"{letter}_proj")(x[None]).view(shape) for letter in "qkv")
        if self.norm is not None:
            q, k = module.q_norm(q), module.k_norm(k)
        rows = self.rope.positions
        cos, sin = self.rope.cos[rows][None].double(), self.rope.sin[rows][None].double()
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return {"q": q.transpose(1, 2)[0], "k": k.transpose(1, 2)[0], "v": v[0]}

    def gradients_by_transformers(self, upstream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = self.x.double().requires_grad_()
        out = self.by_transformers(x)
        torch.autograd.backward([out[name] for name in "qkv"], [upstream[name].double() for name in "qkv"])
        found = {"dx": x.grad}
        for letter in "qkv":
            projection = getattr(self.module, f"{letter}_proj")
            found[f"w{letter}"] = projection.weight.grad
            if self.has_bias:
                found[f"b{letter}"] = projection.bias.grad
        if self.norm is not None:
            found |= {"q_norm": self.module.q_norm.weight.grad, "k_norm": self.module.k_norm.weight.grad}
        return found

    def refs(self) -> tuple:
        """weights and biases as the plain references take them."""
        return [self.shards[name] for name in ("wq", "wk", "wv")], (
            [self.shards[name] for name in ("bq", "bk", "bv")] if self.has_bias else None
        )


def random_gradients(layer: Layer) -> dict[str, torch.Tensor]:
    return {name: torch.randn(value.shape).to(value.dtype) for name, value in layer.empty().items() if name in "qkv"}


def backward(
    layer: Layer,
    upstream: dict[str, torch.Tensor],
    saved: dict[str, torch.Tensor],
    rank: int,
    *,
    only: set[str] | None = None,
    scale: float = 0.5,
    tiles: bool = True,
) -> dict[str, torch.Tensor]:
    """What `qkv_grad` writes, and what it adds to shards that held something, divided by `scale`."""
    x = layer.x
    targets: dict[str, object] = {"dx": torch.full_like(x, torch.nan)}
    if layer.norm is not None:
        targets |= {
            name: torch.full((layer.head_dim,), torch.nan, dtype=torch.float32) for name in ("q_norm", "k_norm")
        }
    shards = {name: split(torch.randn(join(owned).shape), layer.world) for name, owned in layer.shards.items()}
    before = {name: join(owned).clone() for name, owned in shards.items()}
    targets |= {name: layer.peers(name, owned, rank) for name, owned in shards.items()}
    qkv_grad(
        **{f"d{name}": gradient for name, gradient in upstream.items()},
        x=x,
        weights=layer.weights(rank),
        rope=layer.rope,
        norm=layer.norm,
        q_pre=saved.get("q_pre"),
        k_pre=saved.get("k_pre"),
        out=QkvGradients(**{name: target for name, target in targets.items() if only is None or name in only}),
        scale=scale,
        **({"block": 16, "dx_tile": DX_TILE, "wgrad_tile": WGRAD_TILE} if tiles else {}),
    )
    found = {name: target for name, target in targets.items() if isinstance(target, torch.Tensor)}
    return found | {name: (join(owned) - before[name]) / scale for name, owned in shards.items()}


def check(layer: Layer, rank: int, *, default_tiles: bool = False) -> None:
    """Forward and every gradient by name, against transformers and against the plain references."""
    dtype = layer.x.dtype
    out = layer.forward(rank, None if default_tiles else TILE)
    ref = dict(zip("qkv", qkv_ref(layer.x, *layer.refs(), layer.rope, layer.norm, layer.head_dim), strict=True))
    want = layer.by_transformers(layer.x.double())
    for name in "qkv":
        close(f"{name} against the reference", out[name], ref[name], dtype)
        close(f"{name} against transformers", out[name], want[name], dtype)
    upstream = random_gradients(layer)
    want = layer.gradients_by_transformers(upstream)
    ref = qkv_grad_ref(tuple(upstream.values()), layer.x, *layer.refs(), layer.rope, layer.norm)
    got = backward(layer, upstream, out, rank, tiles=not default_tiles)
    assert got.keys() == want.keys() == ref.keys()
    for name, gradient in got.items():
        close(f"{name} against the reference", gradient, ref[name], dtype)
        close(f"{name} against transformers", gradient, want[name], dtype)


@pytest.mark.parametrize(
    ("family", "world", "dtype"),
    [
        slow("llama", 3, torch.float32),
        ("qwen2", 1, torch.float32),
        ("qwen3", 8, torch.float32),
        slow("qwen3 with bias", 3, torch.float16),
        ("qwen3 with bias", 3, torch.bfloat16),
        *(slow("qwen3 with bias", world, torch.bfloat16) for world in (2, 4)),
    ],
    ids=str,
)
def test_as_transformers(family: str, world: int, dtype: torch.dtype) -> None:
    check(Layer.of(family, world=world, dtype=dtype), world // 2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 16, "columns": 16, "world": 4},  # tiles without a rest
        {"tokens": 17, "columns": 1, "heads": (1, 1), "world": 8},  # one head, 2 rows per owner
        {"tokens": 5, "columns": 37, "heads": (3, 1), "world": 7},  # 16 rows over 7: the last owner has none
        {"tokens": 1, "columns": 9, "heads": (2, 1), "head_dim": 64, "world": 3},
        {"tokens": 2, "columns": 8, "heads": (1, 1), "head_dim": 128, "world": 2},
    ],
    ids=str,
)
def test_shapes(sizes: dict) -> None:
    check(Layer.of("qwen3 with bias", **sizes), sizes["world"] - 1)


def test_no_tokens() -> None:
    layer = Layer.of("qwen3 with bias", tokens=0)
    assert layer.forward(0)["q"].shape == (0, 4, 16)
    for name, gradient in backward(layer, random_gradients(layer), layer.empty(), 0).items():
        assert (gradient == 0).all(), name


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(13, torch.bfloat16), (70, torch.bfloat16), (70, torch.float32)], ids=str
)
def test_default_tiles(tokens: int, dtype: torch.dtype) -> None:
    # 70 columns: one step of 64 and a rest; of 70 tokens 24 and 46 to a document.
    check(Layer.of("qwen3", tokens=tokens, columns=70, dtype=dtype, heads=(2, 1), world=3), 1, default_tiles=True)


def test_norm_weights_of_zero_and_in_fp32() -> None:
    layer = Layer.of("qwen3", tokens=5, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.module.q_norm.weight[3:7] = 0
        layer.module.k_norm.weight[:] = 0
    layer.norm = QkNorm(
        q_weight=layer.module.q_norm.weight.detach().float(),
        k_weight=layer.module.k_norm.weight.detach().float(),
        eps=layer.norm.eps,
    )
    check(layer, 0)


def test_the_same_bits_whoever_owns_and_asks() -> None:
    layer = Layer.of("qwen3 with bias", world=1)
    want = layer.forward(0)
    layer.shards = {name: split(join(shards), 3) for name, shards in layer.shards.items()}
    for rank in (0, 2):
        for name, value in layer.forward(rank).items():
            assert torch.equal(value, want[name]), (name, rank)


@pytest.mark.parametrize(
    "only", [{"q_norm", "k_norm"}, {"wk", "bk", "dx"}, set()], ids=lambda only: "+".join(sorted(only))
)
def test_what_needs_no_gradient_is_left_alone(only: set[str]) -> None:
    layer = Layer.of("qwen3 with bias", tokens=5, world=3)
    out, upstream = layer.forward(2), random_gradients(layer)
    want = qkv_grad_ref(tuple(upstream.values()), layer.x, *layer.refs(), layer.rope, layer.norm)
    for name, gradient in backward(layer, upstream, out, 2, only=only).items():
        if name in only:
            close(name, gradient, want[name], torch.float32)
        else:
            assert gradient.isnan().all() if name in ("dx", "q_norm", "k_norm") else (gradient == 0).all(), name


def test_a_position_without_a_row_makes_nan() -> None:
    layer = Layer.of("llama", world=2)
    want = layer.forward(0)
    wrong = {4: -1, 9: POSITIONS, 15: 2**40}
    for token, position in wrong.items():
        layer.rope.positions[token] = position
    out = layer.forward(0)
    others = [token for token in range(21) if token not in wrong]
    for name in "qk":
        assert out[name][list(wrong)].isnan().all()
        assert torch.equal(out[name][others], want[name][others])
    assert torch.equal(out["v"], want["v"])
