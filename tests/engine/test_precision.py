"""Mixed precision: against plain torch that casts by hand, and against FSDP2 on the same two ranks."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import full_parameters, fully_shard, minibatch
from tests.support import ranks
from tests.support.gradients import gradients_of
from tests.support.models import CASES, build, microbatches
from tests.support.parity import relative

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = [5, 17, 3, 9]
DEAL = [[0, 2, 3], [1], []]  # unequal counts, and a rank with none


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
    case = CASES[name]
    model = build(name)
    fully_shard(model, mp_policy=policy)
    batches = [microbatches(name, SIZES, seed=3)[index] for index in DEAL[rank]]
    with minibatch(model, tokens=sum(case.count(batch) for batch in batches)) as mb:
        for batch in batches:
            (case.loss(model, batch) / mb.tokens).backward()
    got = gradients_of(model)
    local = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step()
    masters = {key: p.full_tensor() for key, p in model.named_parameters()}
    dist.barrier()
    return got, local, masters, dict(full_parameters(model))


def test_low_precision_compute() -> None:
    """The last one sums in bf16 too."""
    cases = [("gpt2-tied", BF16), ("qwen3-moe", BF16), ("llama", FP16), ("qwen2", BF16)]
    policies = [MixedPrecisionPolicy(param_dtype=dtype) for _, dtype in cases]
    policies[-1] = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    calls = [(_sharded, name, policy) for (name, _), policy in zip(cases, policies, strict=True)]
    for (name, dtype), policy, found in zip(cases, policies, ranks.run_all(3, *calls), strict=True):
        want = by_hand(name, dtype)
        for got, dtypes, masters, published in found:
            assert dtypes == {FP32}  # the masters' dtype, whatever was summed in
            assert got.keys() == want.keys()
            errors = {key: relative(got[key].double(), want[key].double()) for key in want if want[key].numel()}
            if policy.reduce_dtype is None:
                # The same products in the same dtype: only the order of a few fp32 additions differs.
                assert max(errors.values()) < 1e-6, (name, errors)
            else:
                assert all(torch.equal(gradient, gradient.to(BF16).float()) for gradient in got.values())
                assert 1e-4 < max(errors.values()) < 2e-2, errors  # 2^-8 for each of four additions
            assert {master.dtype for master in masters.values()} == {FP32}
            masters = {key: master.to(dtype) for key, master in masters.items()}
            torch.testing.assert_close(published, masters, rtol=0, atol=0)


def _double(rank: int, world: int) -> tuple:
    case = CASES["conv"]
    model = fully_shard(build("conv").double())
    with minibatch(model, tokens=1) as mb:
        for images, labels in microbatches("conv", [[3, 2], [4]][rank], seed=rank):
            (case.loss(model, (images.double(), labels)) / mb.tokens).backward()
    return gradients_of(model)


def _as_double(found: list) -> None:
    case, model = CASES["conv"], build("conv").double()
    for rank, sizes in enumerate([[3, 2], [4]]):
        for images, labels in microbatches("conv", sizes, seed=rank):
            (case.loss(model, (images.double(), labels)) / 2).backward()
    for got in found:
        for key, parameter in model.named_parameters():
            assert got[key].dtype == FP64
            assert parameter.numel() == 0 or relative(got[key], parameter.grad) < 1e-13, key


def _low_precision_masters(rank: int, world: int) -> tuple:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(nn.Linear(4, 4).to(BF16))
    with minibatch(model):
        model(torch.ones(2, 4, dtype=BF16)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return [str(warning.message) for warning in caught], model.weight.grad.dtype, model.weight.dtype


def _one_copy(rank: int, world: int, dtype: torch.dtype | None) -> tuple[bool, bool]:
    """Whether the optimizer's tensor is what peers compute with, without publishing."""
    model = fully_shard(nn.Linear(3, 4), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    dist.barrier()
    with torch.no_grad():
        model.weight.to_local().fill_(rank + 1)
    dist.barrier()
    seen = model._odc_engine.shards[0].read()  # of the owners' memory; a forward would publish first
    dist.barrier()
    return seen.dtype, bool((seen[:2] == 1).all() and (seen[2:] == 2).all())


def test_masters() -> None:
    """One copy where the dtypes agree; doubles; low precision, with a warning."""
    dtypes = (None, FP32, BF16)
    doubles, low, *copies = ranks.run_all(2, _double, _low_precision_masters, *((_one_copy, dtype) for dtype in dtypes))
    _as_double(doubles)
    for rank, (texts, gradient, weight) in enumerate(low):
        assert (gradient, weight) == (BF16, BF16)
        assert len(texts) == (rank == 0)
        assert not texts or "2 trainable parameters are bfloat16 (weight, …)" in texts[0]
    assert copies == [[(FP32, True)] * 2, [(FP32, True)] * 2, [(BF16, False)] * 2]


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
    with minibatch(model) if library == "odc" else nullcontext():
        output = model(x)
        output.float().square().mean().backward()
    got = gradients_of(model)
    optimizer.step()
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    return [block.seen for block in model.blocks], (output.detach(), x.grad), got, weights


POLICIES = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False),
    MixedPrecisionPolicy(output_dtype=FP64),
]


def test_one_step_of_fsdp2() -> None:
    theirs, ours = (
        ranks.run_all(2, *((_one_step, library, policy) for policy in POLICIES)) for library in ("fsdp2", "odc")
    )
    for policy, of_ranks, want_of_ranks in zip(POLICIES, ours, theirs, strict=True):
        for (seen, exact, grads, weights), want in zip(of_ranks, want_of_ranks, strict=True):
            assert seen == want[0], policy
            torch.testing.assert_close(exact, want[1], rtol=0, atol=0)
            # The mean over two ranks: FSDP2 divides before it adds, we divide the sum; both exact but for overflow.
            torch.testing.assert_close(grads, want[2], rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(weights, want[3], rtol=1e-6, atol=1e-7)
