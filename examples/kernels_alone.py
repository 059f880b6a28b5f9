"""The kernels alone, on torch's symmetric memory: torchrun --nproc-per-node 2 THIS_FILE

Each rank owns rows of a weight. It reads the others' while it multiplies, and adds to their gradients. Needs GPUs that
reach each other's memory; TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 lets all ranks share one.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.nn import functional as F

from odc_kernels.ops import (
    PeerShards,
    StagedWeight,
    check,
    gather,
    linear,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_staged,
    pull,
    wgrad,
)

ROWS, COLUMNS, TOKENS = 50, 32, 16

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
each = -(-ROWS // world)
own = slice(rank * each, (rank + 1) * each)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def allocate() -> torch.Tensor:
    return symm_mem.empty(each, COLUMNS, dtype=torch.float32, device=device)


def is_close(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # fp32 sums in another order
    if rank == 0:
        print(f"{what}: as in plain torch")


# Read and multiply.

whole, x = random(0, ROWS, COLUMNS), random(10 + rank, TOKENS, COLUMNS)
out, y = torch.empty_like(whole), x.new_empty(TOKENS, ROWS)
mine = allocate()
mine[: len(whole[own])] = whole[own]
weight = PeerShards.symmetric(mine, rows=ROWS)
handle = symm_mem.rendezvous(mine, dist.group.WORLD)
handle.barrier()  # all owners have written: from here on all ranks may read
linear(x=x, weight=weight, out=y)
is_close("linear", y, F.linear(x, whole))
gather(peers=weight, out=out)
is_close("gather", out, whole)
staged = pull(peers=weight, staged=StagedWeight.of(weight))  # copies that overlap with the kernel
linear_staged(x=x, weight=staged, out=y.fill_(torch.nan))
check(staged)
is_close("linear_staged", y, F.linear(x, whole))

# A weight gradient into its owners.

added = allocate().zero_()
sums = PeerShards.symmetric(added, rows=ROWS)
handle.barrier()  # all owners have zeroed: from here on all ranks may add
wgrad(dy=random(20 + rank, TOKENS, ROWS), x=x, weight=sums)
handle.barrier()  # all ranks have added: owners may read
want = sum(random(20 + peer, TOKENS, ROWS).T @ random(10 + peer, TOKENS, COLUMNS) for peer in range(world))
is_close("wgrad", added[: len(want[own])], want[own])

# A fused loss.

added.zero_()
handle.barrier()
targets = torch.arange(rank, rank + TOKENS, device=device)
output = linear_cross_entropy(h=x, weight=weight, targets=targets)
dh, g_logp = torch.empty_like(x), torch.full_like(output.logp, -1.0)  # of the loss -sum(logp)
linear_cross_entropy_grad(
    h=x, weight=weight, targets=targets, output=output, g_logp=g_logp, gradient=sums, dh=dh
)  # fmt: skip
handle.barrier()

head = whole.clone().requires_grad_()
dw = torch.zeros_like(whole)
for peer in range(world):
    h = random(10 + peer, TOKENS, COLUMNS).requires_grad_()
    theirs = torch.arange(peer, peer + TOKENS, device=device)
    loss = F.cross_entropy(F.linear(h, head), theirs, reduction="sum")
    dw += torch.autograd.grad(loss, head, retain_graph=True)[0]
    if peer == rank:
        is_close("linear_cross_entropy", -output.logp.sum(), loss)
        is_close("its gradient of h", dh, torch.autograd.grad(loss, h)[0])
is_close("its gradient of the weight", added[: len(dw[own])], dw[own])
handle.barrier()  # no rank frees memory that another still reads
if device.type == "cuda":
    torch.cuda.synchronize()
dist.destroy_process_group()
