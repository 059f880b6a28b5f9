"""Ray Train starts `odc-triton train sft`: python THIS_FILE MODEL DATA FOLDER, which all workers see

If a worker dies the other names it, and Ray starts both again: the run continues from its own last checkpoint.
"""

import sys
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from odc_triton.train.sft import SftOptions, train_sft


def train(config: dict) -> None:
    train_sft(SftOptions(**config, resume="auto"))


if __name__ == "__main__":
    model, data, folder = (str(Path(name).resolve()) for name in sys.argv[1:])  # workers have folders of their own
    options = {"model": model, "data": data, "out": f"{folder}/run", "steps": 8, "lr": 1e-3, "checkpoint_every": 2}
    workers = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    where = RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1))
    TorchTrainer(train, train_loop_config=options, scaling_config=workers, run_config=where).fit()
    print(f"the trained model is in {folder}/run/model")
