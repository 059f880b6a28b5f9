"""Ray Train on workers that have different numbers of microbatches: python THIS_FILE FOLDER

It is a loop for FSDP2 with one more line, use_odc. If a worker dies the other names it, and Ray starts both again from
the last checkpoint. The model is that of fsdp2.py.
"""

import sys
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import use_odc

ASSIGNED = ([64, 30], [41, 25, 19, 12, 9, 7])  # by worker, the tokens of its sequences in each step


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    return dict(zip(("model", "optimizer", "step"), (*get_state_dict(model, optimizer), step), strict=True))


def train(config: dict) -> None:
    rank, device = ray.train.get_context().get_world_rank(), get_device()
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    use_odc(fully_shard(model), automatic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, targets = 0, sum(tokens - 1 for sequences in ASSIGNED for tokens in sequences)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            dcp.load(saved := states(model, optimizer, first), checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        first = saved["step"]
    for step in range(first, config["steps"]):
        generator = torch.Generator(device).manual_seed(len(ASSIGNED) * step + rank)
        for tokens in ASSIGNED[rank]:
            ids = torch.randint(0, 256, (1, tokens), generator=generator, device=device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (tokens - 1) / targets
            (loss * len(ASSIGNED)).backward()  # FSDP2 divides by the number of workers
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:  # rarely, as all workers wait for each other and for Ray
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(states(model, optimizer, step + 1), checkpoint_id=folder)
                ray.train.report({"step": step, "first": first}, Checkpoint.from_directory(folder))


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=len(ASSIGNED), use_gpu=torch.cuda.is_available())
    where = RunConfig(storage_path=str(Path(sys.argv[1]).resolve()), failure_config=FailureConfig(max_failures=1))
    print(TorchTrainer(train, train_loop_config={"steps": 6}, scaling_config=workers, run_config=where).fit().metrics)
