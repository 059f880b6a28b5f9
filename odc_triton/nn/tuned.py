"""Tables that `odc-triton tune` measured: their files, the machines they are valid for, and the lines in force.

A table is one JSON file per kind of processor, topology and number of ranks, in the folder ODC_TUNED, by default
~/.cache/odc-triton/tuned (or XDG_CACHE_HOME's). With ODC_TUNED=off none is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from odc_kernels import tiles

from ..base.environment import installed
from ..machine.topology import Place
from .choice import TABLE, WORDS, Choice, Entry, as_choice

VARIABLE = "ODC_TUNED"
OFF = "off"
FORMAT = 1
_VERSIONS_OF = ("odc-triton", "torch", "triton")
_TILES = {kind.__name__: kind for kind in (tiles.LinearTile, tiles.WgradTile)}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measured choice: for weights of this shape and dtype and up to this many tokens (None: no limit).

    seconds: of every measured candidate, by its words, forward and backward.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str
    tokens: int | None
    choice: Choice
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The tables in force. `digest`: the same on all ranks that read the same file, empty if there is none.

    unused: why an existing file is not used. attention: by dtype and `Decoder.words`, the time of a FLOP of attention
    in those of linear layers; by `Decoder.rule_words` that of a recurrent layer's rule.
    """

    lines: tuple[Line, ...] = ()
    attention: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    unused: str | None = None

    def table(self, dtype: str) -> tuple[Entry, ...]:
        """For weights of a dtype ("bfloat16"): the measured lines, then the shipped ones."""
        own = [line for line in self.lines if line.dtype == dtype]
        if not own:
            return TABLE
        entries = [Entry(operator=o.operator, shape=o.shape, tokens=o.tokens, choice=o.choice) for o in own]
        return (*entries, *TABLE)


def default_folder() -> Path | None:
    """The folder of tables; None if they are turned off."""
    folder = os.environ.get(VARIABLE, "")
    if folder == OFF:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) if folder else Path(cache) / "odc-triton" / "tuned"


def load(place: Place, folder: Path | None) -> Tuned:
    """The measurements of this place; none, with the reason, if they are of other versions or can't be read."""
    if folder is None:
        return Tuned()
    path = folder / place.file_name
    try:
        data = path.read_bytes()
        content = json.loads(data)
        if (content["format"], content["place"]) != (FORMAT, asdict(place)):
            raise ValueError(f"it is of format {content['format']} for {content['place']}")
        if content["versions"] != versions():
            return _unused(path, f"it was measured with {content['versions']}, but installed are {versions()}")
        lines = tuple(_read_line(line) for line in content["lines"])
        attention = {key: float(factor) for key, factor in content.get("attention", {}).items()}
        if not all(0 < factor < math.inf for factor in attention.values()):
            raise ValueError(f"the times of attention are {attention}")
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return _unused(path, f"it can't be read ({type(error).__name__}: {error})")
    return Tuned(lines=lines, attention=attention, digest=hashlib.sha256(data).hexdigest())


def _unused(path: Path, why: str) -> Tuned:
    remedy = f"Run `odc-triton tune` again, remove it, or set {VARIABLE}={OFF}"
    return Tuned(unused=f"{path} is not used: {why}. {remedy}")


def versions() -> dict[str, str]:
    """The versions of packages that a measurement depends on."""
    return installed(*_VERSIONS_OF)


def _read_line(content: dict[str, Any]) -> Line:
    choice = as_choice(content["choice"])
    unknown = {choice.backend, choice.source, choice.wgrad} - WORDS[content["operator"]]
    if unknown and content["operator"] != "log_probs":
        raise ValueError(f"{content['operator']} does not know {', '.join(sorted(unknown))}")
    given = tuple((each["kernel"], _TILES[each["kind"]](**each["sizes"])) for each in content.pop("tiles"))
    return Line(**content | {"shape": tuple(content["shape"]), "choice": replace(choice, tiles=given)})
