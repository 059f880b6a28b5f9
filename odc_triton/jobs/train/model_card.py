"""README.md of a trained model: what the hub wants to know of it, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.files import write_file
from ..data.sources import hub_id_of
from ..options.options import flag
from ..reports.report import table
from .metrics import Metrics
from .outcome import typed, versions
from .run_folder import options_of
from .run_options import PATHS

_OURS = "<!-- odc-triton wrote this file, and replaces it as long as this line is in it. -->"
_TASKS = {"reward": "text-classification"}
_IN_TEXT = {*PATHS, "data", "eval_data", "data_weight", "tokenizer", "steps", "epochs"}
_ALWAYS = {"lr": "peak learning rate", "dtype": "dtype of compute"}  # and what a step takes: these make the model
_SCORE = """## Scoring

The score is that of the last token that is no padding: the end token, unless that is the padding too.

```python
import torch
from transformers import AutoTokenizer
{imports}

folder = "."  # this folder, or its hub id
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {load}
texts = [prompt + answer + tokenizer.eos_token for prompt, answer in [("Two and two?", " Four."), ("Hello", " No.")]]
with torch.no_grad():
    scores = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
print(scores)  # the larger one is the better answer
```"""
_MODEL = {
    "imports": "from transformers import AutoModelForSequenceClassification",
    "load": "AutoModelForSequenceClassification.from_pretrained(folder)",
}
_ADAPTERS = {
    "imports": "from peft import AutoPeftModelForSequenceClassification",
    "load": """AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
config = model.config.get_text_config()
if config.pad_token_id is None:  # as in training
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id""",
}


def write_card(folder: str | Path, identity: Mapping[str, Any], steps: Sequence[Metrics]) -> None:
    """Describes the model or adapters in `folder`, of a run of that `identity` after these `steps`. A README.md of
    another origin stays. It names local files without their folders, as it may be published. Raises OSError.
    """
    path = Path(folder, "README.md")
    if path.exists() and _OURS not in path.read_text(errors="replace"):
        print(f"{path} stays as it is: it was not written by odc-triton")
    else:
        write_file(path, _card(Path(folder), identity, steps).encode())


def _card(folder: Path, identity: Mapping[str, Any], steps: Sequence[Metrics]) -> str:
    from huggingface_hub import ModelCardData

    job, kind, here = identity.get("job", "sft"), options_of(identity), {each.name for each in folder.iterdir()}
    what, library = ("Adapters", "peft") if "adapter_config.json" in here else ("A model", "transformers")
    sees_images = not here.isdisjoint(("processor_config.json", "preprocessor_config.json"))
    data = [identity["data"]] if isinstance(identity["data"], str) else identity["data"]
    on_hub = {name: identity[name] for name, digest in identity.get("contents", {}).items() if digest is None}
    base = on_hub.get("model")
    front = ModelCardData(
        base_model=base,
        datasets=[*filter(None, map(hub_id_of, data))] or None,
        library_name=library,
        pipeline_tag=_TASKS.get(job, "image-text-to-text" if sees_images else "text-generation"),
        tags=["odc-triton", job, *["lora"] * bool(identity.get("lora_rank"))],
    )
    names = {name: on_hub.get(name) or Path(identity[name]).name for name in PATHS if identity.get(name)}
    origin = f"[{base}](https://huggingface.co/{base})" if base else names.get("model", "random weights")
    chosen = {words: typed(identity[name]) for name, words in _ALWAYS.items() if identity.get(name) is not None}
    chosen |= {name.replace("_", " "): value for name, value in identity.items() if name.endswith("_per_step")}
    usual = {name: typed(value) for name, value in kind.defaults().items() if name not in {*_IN_TEXT, *_ALWAYS}}
    given = {
        flag(name): typed(identity[name])
        for name in sorted(identity.keys() & usual)
        if typed(identity[name]) != usual[name]
    }
    given |= {flag(name): value for name, value in names.items() if name != "model"}
    scores = {name: value for line in steps for name, value in line.items() if _is_score(name) and value is not None}
    tables = {"Scores": scores, "Training": chosen | given, "Versions": versions()}
    named = (folder.parent if folder.name in ("model", "adapter") else folder).resolve().name
    text = (
        f"{what} trained from {origin} on {', '.join(hub_id_of(each) or Path(each).name for each in data)} by "
        f"`odc-triton train {job}` in {steps[-1]['step'] if steps else 0} steps."
    )
    score = [_SCORE.format(**_ADAPTERS if library == "peft" else _MODEL)] if job == "reward" else []
    parts = [f"## {title}\n\n{table([*rows.items()], ['', ''])}" for title, rows in tables.items() if rows]
    return "\n\n".join([f"---\n{front.to_yaml()}\n---", _OURS, f"# {named}", text, *score, *parts]) + "\n"


def _is_score(name: str) -> bool:
    return name in ("loss", "reward", "divergence", "rewards/accuracies") or name.startswith("eval_")
