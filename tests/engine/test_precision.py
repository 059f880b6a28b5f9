"""Mixed precision: against plain torch that casts by hand, and against FSDP2 on the same two ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import ranks
from tests.support.models import CASES, build, microbatches

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = [5, 17, 3, 9]
DEAL = [[0, 2, 3], [1], []]  # unequal counts, and a rank with none


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------ against plain torch


def by_hand(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters cast to `dtype`, each microbatch's gradient computed in it, their sum in fp32."""
    case = CASES[name]
    model = build(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    batches = microbatches(name, SIZES, seed=3)
    total = sum(case.count(batch) for batch in batches)
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        inputs = tuple(value.to(dtype) if value.is_floating_point() else value for value in batch)
        (case.loss(model, inputs) / total).backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[key] = sums.get(key, 0) + parameter.grad.float()
                parameter.grad = None
    return sums


def _sharded(rank: int, world: int, name: str, policy: MixedPrecisionPolicy) -> tuple:
    from odc_triton import full_parameters, fully_shard, minibatch

    case = CASES[name]
    model = build(name)
    fully_shard(model, mp_policy=policy)
    batches = [microbatches(name, SIZES, seed=3)[index] for index in DEAL[rank]]
    with minibatch(model, tokens=sum(case.count(batch) for batch in batches)) as mb:
        for batch in batches:
            (case.loss(model, batch) / mb.tokens).backward()
    got = gradients(model)
    local = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step()
    masters = {key: p.full_tensor() for key, p in model.named_parameters()}
    dist.barrier()
    return got, local, masters, dict(full_parameters(model))


def error_by_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2", BF16), ("gpt2-tied", BF16), ("qwen3-moe", BF16), ("llama", FP16)]
)
def test_low_precision_compute(name: str, dtype: torch.dtype) -> None:
    want = by_hand(name, dtype)
    for got, dtypes, masters, published in ranks.run(_sharded, 3, name, MixedPrecisionPolicy(param_dtype=dtype)):
        assert dtypes == {FP32}
        assert got.keys() == want.keys()
        for key, gradient in want.items():
            # The same products in the same dtype: only the order of a few fp32 additions differs.
            assert gradient.numel() == 0 or error_by_norm(got[key], gradient) < 1e-6, key
        for key, master in masters.items():
            assert master.dtype == FP32
            torch.testing.assert_close(published[key], master.to(dtype), rtol=0, atol=0)


def test_reduce_dtype_is_honoured() -> None:
    want = by_hand("qwen2", BF16)
    for got, dtypes, _, _ in ranks.run(_sharded, 3, "qwen2", MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)):
        assert dtypes == {FP32}  # the masters' dtype, whatever was summed in
        for key, gradient in got.items():
            torch.testing.assert_close(gradient, gradient.to(BF16).float(), rtol=0, atol=0)
            assert error_by_norm(gradient, want[key]) < 2e-2  # 2^-8 for each of four additions
        assert any(error_by_norm(got[key], want[key]) > 1e-4 for key in got)


def _double(rank: int, world: int) -> tuple:
    from odc_triton import fully_shard, minibatch

    case = CASES["conv"]
    model = fully_shard(build("conv").double())
    with minibatch(model, tokens=1) as mb:
        for images, labels in microbatches("conv", [[3, 2], [4]][rank], seed=rank):
            (case.loss(model, (images.double(), labels)) / mb.tokens).backward()
    return gradients(model)


def test_double() -> None:
    case, model = CASES["conv"], build("conv").double()
    for rank, sizes in enumerate([[3, 2], [4]]):
        for images, labels in microbatches("conv", sizes, seed=rank):
            (case.loss(model, (images.double(), labels)) / 2).backward()
    for got in ranks.run(_double, 2):
        for key, parameter in model.named_parameters():
            assert got[key].dtype == FP64
            assert parameter.numel() == 0 or error_by_norm(got[key], parameter.grad) < 1e-13, key


def _low_precision_masters(rank: int, world: int) -> tuple:
    from odc_triton import fully_shard, minibatch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(nn.Linear(4, 4).to(BF16))
    with minibatch(model):
        model(torch.ones(2, 4, dtype=BF16)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return [str(warning.message) for warning in caught], model.weight.grad.dtype, model.weight.dtype


def test_low_precision_masters_warn() -> None:
    for rank, (texts, gradient, weight) in enumerate(ranks.run(_low_precision_masters, 2)):
        assert (gradient, weight) == (BF16, BF16)
        assert len(texts) == (rank == 0)
        assert not texts or "2 trainable parameters are bfloat16 (weight, …)" in texts[0]


def _one_copy(rank: int, world: int, dtype: torch.dtype | None) -> tuple[bool, bool]:
    """Whether the optimizer's tensor is what peers compute with, without publishing."""
    from odc_triton import fully_shard

    model = fully_shard(nn.Linear(3, 4), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    dist.barrier()
    with torch.no_grad():
        model.weight.to_local().fill_(rank + 1)
    dist.barrier()
    model.unshard()
    seen = model.weight.detach().clone()
    dist.barrier()
    return seen.dtype, bool((seen[:2] == 1).all() and (seen[2:] == 2).all())


def test_one_copy_where_the_dtypes_agree() -> None:
    assert ranks.run(_one_copy, 2, None) == [(FP32, True)] * 2
    assert ranks.run(_one_copy, 2, FP32) == [(FP32, True)] * 2
    assert ranks.run(_one_copy, 2, BF16) == [(BF16, False)] * 2


# ------------------------------------------------------------------ against FSDP2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += [x.dtype, scale.dtype, self.up.weight.dtype]
        x = x.to(self.up.weight.dtype)
        return {"x": x + self.down(torch.relu(self.up(self.norm(x)))) * scale.to(x.dtype)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=torch.ones(()))["x"]
        return self.head(x.to(self.head.weight.dtype))


def _one_step(rank: int, world: int, library: str, policy: MixedPrecisionPolicy) -> tuple:
    from odc_triton import fully_shard, minibatch

    torch.manual_seed(0)
    model = Net()
    if library == "fsdp2":
        mesh = dist.init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def compute() -> torch.Tensor:
        output = model(x)
        output.float().square().mean().backward()
        return output.detach()

    if library == "fsdp2":
        output = compute()
    else:
        with minibatch(model):
            output = compute()
    got = gradients(model)
    optimizer.step()
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    return output, x.grad, [block.seen for block in model.blocks], got, weights


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False),
        MixedPrecisionPolicy(output_dtype=FP64),
    ],
    ids=["fp32", "bf16", "output", "inputs-as-they-are", "output-only"],
)
def test_one_step_of_fsdp2(policy: MixedPrecisionPolicy) -> None:
    theirs = ranks.run(_one_step, 2, "fsdp2", policy)
    ours = ranks.run(_one_step, 2, "odc", policy)
    for (output, x_grad, seen, grads, weights), want in zip(ours, copy.deepcopy(theirs), strict=True):
        assert seen == want[2]
        assert output.dtype == want[0].dtype
        torch.testing.assert_close(output, want[0], rtol=0, atol=0)
        torch.testing.assert_close(x_grad, want[1], rtol=0, atol=0)
        assert grads.keys() == want[3].keys()
        for name, gradient in want[3].items():
            # The mean over two ranks: FSDP2 divides before it adds, we divide the sum; both exact but for overflow.
            torch.testing.assert_close(grads[name], gradient, rtol=1e-6, atol=1e-9)
        for name, weight in want[4].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7)
