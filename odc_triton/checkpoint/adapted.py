"""What is behind a model's folder or hub id: its config, and the base of PEFT's adapter."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from ..base.files import read_json_object, reading, require_source

CONFIG, ADAPTER = "config.json", "adapter_config.json"


def base_of(source: str | os.PathLike) -> str | None:
    """The model below PEFT's adapter in a folder or hub id, as transformers' `from_pretrained` finds it: the one that
    the adapter names, or `source` itself for a folder that has both. None: there is no adapter.

    Raises OSError for a base that is not there, and ValueError.
    """
    folder = Path(source)
    if folder.is_file() or (folder.is_dir() and not Path(folder, ADAPTER).is_file()):
        return None
    from transformers.utils import find_adapter_config_file

    with reading(str(source)):
        found = find_adapter_config_file(str(source))
    if found is None:
        return None
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f'{source} has an adapter ({ADAPTER}), and PEFT reads it: pip install "odc-triton[peft]"')
    if Path(folder, CONFIG).is_file():
        return str(source)
    base = read_json_object(found, "give an adapter's folder").get("base_model_name_or_path")
    said = f"{source} has an adapter and no model, and {ADAPTER} names {base!r} as its base (base_model_name_or_path)"
    if not base or (Path(base, ADAPTER).is_file() and not Path(base, CONFIG).is_file()):
        raise ValueError(f"{said}, which is not a model: write the folder of its model there")
    try:
        require_source(base)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{said}: {error}; write the folder of its model there") from None
    return base


def with_tokenizer(source: str | Path) -> str | Path:
    """`source`; for an adapter that has no tokenizer, its base."""
    from transformers.utils import cached_file

    base = base_of(source)
    if base is None or cached_file(str(source), "tokenizer_config.json", _raise_exceptions_for_missing_entries=False):
        return source
    return base


def read_config(source: str) -> Any:
    """Transformers' config from a folder, a config.json or a hub id. Raises OSError and ValueError."""
    from transformers import AutoConfig

    source = base_of(source) or str(source)
    with reading(source):
        if Path(source).is_file():
            read_json_object(source, "give the config.json of a model")
        try:
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
        except OSError:
            raise
        except Exception as error:  # its fields' checks raise other libraries' classes
            raise ValueError(f"{source} is not the config of a model that transformers has: {error}") from error
