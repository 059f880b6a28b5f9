"""One kernel on the CPU, interpreted. Runs as is, on one rank, or: torchrun --nproc-per-node 2 THIS_FILE"""

import os

import torch

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: runs kernels on the CPU, slowly
from odc_kernels.ops import PeerShards, linear

ROWS, COLUMNS, TOKENS = 50, 32, 16
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
whole, x, y = torch.randn(ROWS, COLUMNS), torch.randn(TOKENS, COLUMNS), torch.empty(TOKENS, ROWS)
memory = torch.from_file("weight.bin", shared=True, size=ROWS * COLUMNS)  # a file that all ranks map
each = -(-ROWS // world)  # rows of a rank; the last may have fewer
shards, mine = memory.view(ROWS, COLUMNS).split(each), whole.split(each)[rank]
shards[rank].copy_(mine)
weight = PeerShards.of(shards, shape=(ROWS, COLUMNS), rank=rank)
if world > 1:
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()  # all owners have written: from here on all ranks may read
linear(x=x, weight=weight, out=y)
print(f"rank {rank} owns {len(mine)} of {ROWS} rows; error {(y - x @ whole.T).abs().max().item():.7f}")
