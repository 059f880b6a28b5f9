"""The files that hold a model's weights, chosen as transformers' `from_pretrained` chooses them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import CheckpointCorrupt
from ..base.files import read_json_object, reading
from .adapted import CONFIG, base_of

if TYPE_CHECKING:
    from safetensors import safe_open

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_WEIGHTS = re.compile(r".*\.(safetensors|gguf|pth|h5|msgpack)|pytorch_model.*\.bin")
_NARROW = re.compile(r"[A-Z]+[468](_.*)?")  # safetensors' names of types that only quantised weights have


def weights_folder(source: str | Path) -> Path:
    """A local folder as given, for an adapter its base's; for a hub id, the local folder of its safetensors, downloaded
    if allowed.
    """
    source = base_of(source) or source
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    with reading(str(source)):
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))


class PretrainedFiles:
    """The tensors of a folder's safetensors files, by name. Reads only requested rows.

    Raises FileNotFoundError for a folder without weights, ValueError for weights that can't be read by rows or are
    quantised, CheckpointCorrupt for files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, safe_open] = {}
        self.file_of: dict[str, str] = {}
        path = folder / CONFIG
        config = read_json_object(path, "give a model's folder") if path.is_file() else {}
        refuse_quantised(folder, config)
        for file in _files_of(folder, config):
            self.file_of |= dict.fromkeys(self._file(file).keys(), file)  # of two tensors of a name the last counts

    def _file(self, name: str) -> safe_open:
        from safetensors import safe_open

        if name not in self._opened:
            try:
                self._opened[name] = safe_open(self.folder / name, framework="pt")
            except Exception as error:  # safetensors does not export its own class
                raise CheckpointCorrupt(f"{self.folder / name} can't be read: {error}") from error
        return self._opened[name]

    def _slice(self, name: str) -> Any:
        return self._file(self.file_of[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def require_plain(self, name: str) -> None:
        """Raises ValueError for a weight whose numbers are of a quantised type."""
        if _NARROW.fullmatch(dtype := self._slice(name).get_dtype()):
            raise _quantised(self.folder, f"{name} is {dtype}", None)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A whole tensor, or these rows of it; a scalar has one row."""
        if rows is None or not self.shape(name):
            return rows_of(self._file(self.file_of[name]).get_tensor(name), rows)
        return self._slice(name)[rows]


def rows_of(value: torch.Tensor, rows: slice | None) -> torch.Tensor:
    return value if rows is None else torch.atleast_1d(value)[rows]


def _files_of(folder: Path, config: dict[str, Any]) -> list[str]:
    """transformers' rule: what the config names, else one file, else those of an index, whole.

    An index only names files: every tensor in them counts.
    """
    present = sorted(path.name for path in folder.glob("*") if _WEIGHTS.fullmatch(path.name))
    parts = [name for name in present if re.match(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", name)]
    found = config.get("transformers_weights") or next((n for n in (_SINGLE, _INDEX) if (folder / n).is_file()), None)
    pickles = [name for name in present if name.endswith(".bin")]
    if parts or (found is None and pickles):
        kind = "a distributed checkpoint's" if parts else "a pickle"
        raise ValueError(
            f"{folder} has its weights in {(parts or pickles)[0]}, {kind}, which can't be read in parts: convert it "
            f"once, AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(another_folder)"
        )
    if found is None:
        others = f", only {', '.join(present[:3])}" if present else ""
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}{others}: it has no weights to read")
    files = [found]
    if found.endswith(".index.json"):
        try:
            index = read_json_object(folder / found, "write the folder again")
            files = sorted(set(index["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{folder / found} is not an index of safetensors: {error}") from error
    if odd := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise CheckpointCorrupt(f"{folder / found} names {odd[0]!r}, which is not a file in its folder")
    return files


def refuse_quantised(folder: str | Path, config: dict[str, Any]) -> None:
    """Raises ValueError for a config of quantised weights, with the way to others."""
    from transformers.quantizers import auto, base

    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found or not auto.AutoHfQuantizer.supports_quant_method(found):  # which warns of unknown ones
        return
    bits = next((bits for bits in ("4bit", "8bit") if found.get(f"load_in_{bits}")), None)
    method = f"bitsandbytes_{bits}" if bits else found["quant_method"]
    kind, load, then = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method], "dtype=torch.bfloat16", ""
    if "dequantize" in inspect.signature(kind).parameters:
        load += f", quantization_config={kind.__name__}(dequantize=True)"
    elif auto.AUTO_QUANTIZER_MAPPING[method]._dequantize is not base.HfQuantizer._dequantize:
        then = ".dequantize()"
    else:
        load = ""
    raise _quantised(folder, f"quant_method {method} in {CONFIG}", f"({str(folder)!r}, {load}){then}" if load else None)


def _quantised(folder: str | Path, why: str, load: str | None) -> ValueError:
    how = "give the model that they were made of"
    if load is not None:
        how = f"dequantise them once, AutoModelForCausalLM.from_pretrained{load}.save_pretrained(another_folder)"
    return ValueError(f"{folder} has quantised weights ({why}), and their raw values can't be trained: {how}")
