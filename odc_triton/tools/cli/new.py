"""`odc-triton new`: a YAML file of the options that a first run sets, each below its help."""

from __future__ import annotations

import argparse
import os
import shlex
import textwrap
from dataclasses import fields

from ...base.files import write_file
from ...jobs.options.options import expanded, flag
from ...jobs.train.grpo_options import GrpoOptions
from ...jobs.train.pairs_options import DpoOptions
from ...jobs.train.sft_options import SftOptions

_GSM8K = {"data": "openai/gsm8k:main:train", "map": "prompt=question", "reward": "accuracy", "steps": 200}
_PASS = {"epochs": 1.0, "eval_fraction": 0.01}
_FIRST = {  # None: the option's default
    "sft": (SftOptions, {"data": "trl-lib/Capybara", "samples_per_rank": None, **_PASS}),
    "grpo": (GrpoOptions, _GSM8K | dict.fromkeys(("prompts_per_rank", "generations", "max_new_tokens"))),
    "dpo": (DpoOptions, {"data": "trl-lib/ultrafeedback_binarized", "pairs_per_rank": None, "beta": None, **_PASS}),
}


def main(options: argparse.Namespace) -> int:
    import yaml

    path, command = expanded(options.file or f"{options.job}.yaml"), f"odc-triton train {options.job}"
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already: give another name, or remove it")
    kind, values = _FIRST[options.job]
    values = {"model": "Qwen/Qwen3-1.7B", **values, "token_cap": None, "drop_long": True, "lr": None, "lora_rank": None}
    run = f"{command} --config {shlex.quote(path)}"
    text = f"# {run}\n# All options: {command} --help; the command line overrides this file.\n"
    entries = {each.name: each for each in fields(kind)}
    for name, value in (values | {"out": f"out/{options.job}", "resume": "auto"}).items():
        said = textwrap.fill(entries[name].metadata["help"], 100, break_on_hyphens=False).replace("\n", "\n# ")
        text += f"\n# {said}\n" + yaml.safe_dump({flag(name)[2:]: entries[name].default if value is None else value})
    write_file(path, text.encode())
    print(f"{path} is written; edit it, then: {run}")
    return 0
