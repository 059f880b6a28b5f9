"""Training, and an evaluator in another process that reads the current weights: python THIS_FILE"""

import subprocess
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

import odc_triton

IDS = torch.arange(64)[None] % 16  # what there is to learn


def train() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model = odc_triton.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offer = odc_triton.offer_policy(model)
    evaluator = subprocess.Popen([sys.executable, __file__, offer.address])
    while evaluator.poll() is None:  # with several ranks they would agree on the end
        with odc_triton.minibatch(model):
            model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    offer.close()


def evaluate(address: str) -> None:
    logging.disable_progress_bar()  # of each version that is loaded
    reader = odc_triton.read_policy(address)
    config = Qwen2Config.from_dict(reader.config)
    for _ in range(3):
        weights = dict(reader)  # all of one version, reader.version
        model = Qwen2ForCausalLM.from_pretrained(None, config=config, state_dict=weights).eval()
        loss = model(input_ids=IDS, labels=IDS).loss.item()
        print(f"version {reader.version}: loss {loss:.4f}")


if __name__ == "__main__":
    evaluate(sys.argv[1]) if len(sys.argv) > 1 else train()
