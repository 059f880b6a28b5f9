"""Some ranks have images and others have none. Runs as is, or: torchrun --nproc-per-node 2 THIS_FILE"""

import torch
import torch.distributed as dist
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from odc_triton import fully_shard, minibatch
from odc_triton.balance import count_target_tokens, pack_collate, to_device
from odc_triton.hf import enable_packing, summed_loss

IMAGE = 60  # the token that stands for a part of an image; a processor puts it into the text
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **HEADS}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}


def sample(text: int, images: int) -> dict:
    """As a processor makes it: `images` of 4 x 8 patches, four of which are one token, before the text."""
    ids = torch.tensor(([58] + [IMAGE] * 8 + [59]) * images + torch.randint(50, (text,)).tolist())
    labels = torch.where(ids < 50, ids, -100)
    if not images:
        return {"input_ids": ids, "labels": labels}
    grid, values = torch.tensor([[1, 4, 8]] * images), torch.randn(32 * images, 3 * 2 * 4 * 4)
    types = (ids == IMAGE).long()
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": values,
        "image_grid_thw": grid,
        "mm_token_type_ids": types,
    }


torch.manual_seed(0)
model = Qwen2_5_VLForConditionalGeneration(
    Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=VISION, image_token_id=IMAGE)
)
enable_packing(model)  # samples of a microbatch in one row, without padding
model = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rank = dist.get_rank()
torch.manual_seed(rank)

for step in range(3):
    # Rank 0 has images in one of two microbatches. Others have one microbatch, and never run the tower.
    packs = [[sample(9, 2), sample(20, 0)], [sample(14, 0)]] if rank == 0 else [[sample(30, 0)]]
    packs = pack_collate(packs)
    with minibatch(model, tokens=count_target_tokens(packs)) as mb:
        for pack in packs:
            loss = summed_loss(model, to_device(pack, model.device))
            (loss / mb.tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}, step {step}: loss {loss.item() / count_target_tokens(packs[-1:]):.3f}")

dist.barrier()
dist.destroy_process_group()
