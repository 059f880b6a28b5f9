"""Files of torch.distributed.checkpoint (DCP), without its collectives and without trusting the files.

Every rank writes its own rows and a list of them (`Part`); rank 0 joins the lists into DCP's `.metadata`
(`join_parts`). Reading needs no other rank (`read_into`). The files are what `dcp.save` writes and `dcp.load` reads.

[Note: pickles] `.metadata` is a pickle. DCP reads it, and values other than tensors, with an unpickler that runs any
code in them. Here an unpickler that makes only DCP's own records, and sets only their fields, reads `.metadata`. It
calls no class: instructions of a pickle can set attributes of a class, which hold for the whole process. It copies
nothing, takes no size from the file, and refuses lists that tensors share; torch's own check of a tensor's chunks takes
up to the square of their number. `torch.load(weights_only=True)` reads the values, as DCP reads tensors. A record may
only name files in its folder.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from ..base.errors import CheckpointCorrupt
from ..base.untyped import untyped

METADATA = ".metadata"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file's size and digest, as written."""

    size_bytes: int
    sha256: str


class _DigestedFile(io.BufferedWriter):
    """An append-only file that keeps the digest of its content, and the error of a failed write."""

    def __init__(self, path: Path, is_dropped: Callable[[], bool]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._is_dropped, self._digest, self._size_bytes = is_dropped, hashlib.sha256(), 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            if self._is_dropped():
                raise InterruptedError(errno.EINTR, "dropped, as the run ends")
            count = super().write(data)
        except OSError as error:  # torch.save raises its own error instead
            self.problem = error
            raise
        self._digest.update(data)
        self._size_bytes += count
        return count

    def flush(self) -> None:
        if not self.closed:  # a wrapper of torch flushes once more when it is collected
            super().flush()

    def written(self) -> Written:
        return Written(size_bytes=self._size_bytes, sha256=self._digest.hexdigest())


class DigestedFiles(FileSystem):
    """A folder to write to; a file is on disk once its stream is closed. A folder that was removed is an error and
    is not created again. Writing raises InterruptedError once `is_dropped()`.
    """

    def __init__(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        self.written: dict[str, Written] = {}
        self._is_dropped = is_dropped

    def mkdir(self, path: Any) -> None:
        pass

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        file = _DigestedFile(Path(path), self._is_dropped)
        try:
            yield file
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        except BaseException as raised:
            with contextlib.suppress(OSError):  # the rest of the buffer fails again
                file.close()
            problem, file.problem = file.problem or raised, None
            if isinstance(problem, OSError):
                problem.filename = str(path)  # missing in errors of writing and syncing
            try:
                raise problem from None
            finally:
                del problem  # with its traceback's frames it would be a cycle
        self.written[Path(path).name] = file.written()


class _SavePlanner(DefaultSavePlanner):
    """A planner that uses the values in `held`, by flat name, instead of those in the state dict."""

    held: Mapping[str, torch.Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.held[index.fqn] if index.fqn in self.held else super().lookup_object(index)


class Part:
    """This rank's shards of a nested state dict; on rank 0 also the replicated values. `contents`: what is written."""

    def __init__(self, rank: int, state: Mapping[str, Any]) -> None:
        self._rank = rank
        self._planner = _SavePlanner()
        self._planner.set_up_planner(dict(state), None, is_coordinator=True)
        if rank != 0:
            flat = self._planner.state_dict
            self._planner.state_dict = {name: value for name, value in flat.items() if _is_sharded(value)}

    @torch.no_grad()  # so that to_local is quick
    def hold(self, memory: dict[str, torch.Tensor]) -> None:
        """Copies all values to the host, so that `write` may run in a thread while the state changes.

        `memory` has the host's tensors by name. Missing ones are allocated (pinned for values on a GPU); reuse it
        once the part is written. Copies from a GPU are only enqueued on its current stream.
        """
        state = self._planner.state_dict
        held: dict[str, torch.Tensor] = {}
        names: dict[tuple[Any, ...], str] = {}  # tied parameters are held once
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                state[name] = copy.deepcopy(value)
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            first = names.setdefault((local.data_ptr(), local.shape, local.dtype), name)
            if first != name:
                held[name] = held[first]
                continue
            kept = memory.get(name)
            if kept is None or (kept.shape, kept.dtype) != (local.shape, local.dtype):
                kept = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            held[name] = kept.copy_(local, non_blocking=True)
        memory.clear()
        memory.update(held)
        self._planner.held = held

    def write(self, folder: Path, is_dropped: Callable[[], bool] = lambda: False) -> dict[str, Written]:
        """Writes the values and their list into `folder`, which must exist; returns the final files.

        Raises OSError; InterruptedError once `is_dropped()`.
        """
        planner, rank = self._planner, self._rank
        files = DigestedFiles(is_dropped)
        # Values on the host need no prefetched copies, for which DCP would synchronize a stream of this thread's GPU.
        ahead: Any = {"per_thread_copy_ahead": 0} if planner.held else {}
        writer = FileSystemWriter(folder, **ahead)
        writer.fs = files
        plan = writer.prepare_local_plan(planner.create_local_plan())
        (plan,), metadata = create_default_global_save_plan([plan])
        plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]  # names its file after the rank
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        metadata.planner_data = planner.mappings  # how the flat names nest
        metadata.storage_data = {result.index: result.storage_data for result in results}
        metadata.version = CURRENT_DCP_VERSION
        with files.create_stream(folder / list_name(rank), "wb") as file:
            pickle.dump(metadata, file)
        self.contents = metadata
        return {name: file for name, file in files.written.items() if name != list_name(rank)}


def list_name(rank: int) -> str:
    """The name of the file with the list of a rank's part, until `join_parts`."""
    return f"__{rank}{METADATA}"


def _is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor) and any(placement.is_shard() for placement in value.placements)


def join_parts(folder: Path, joined: Metadata, world: int) -> dict[str, Written]:
    """Joins the lists, of rank 0 `joined`, to DCP's `.metadata`, which it returns; removes them. Raises OSError."""
    for rank in range(1, world):
        part = read_metadata(folder, list_name(rank))
        for name, entry in part.state_dict_metadata.items():
            ours = joined.state_dict_metadata.setdefault(name, entry)
            if ours is not entry:
                untyped(ours).chunks += untyped(entry).chunks  # what several ranks have is a tensor
        joined.storage_data |= part.storage_data
        joined.planner_data |= part.planner_data
    files = DigestedFiles()
    with files.create_stream(folder / METADATA, "wb") as file:
        pickle.dump(joined, file)
    for rank in range(world):
        (folder / list_name(rank)).unlink()
    return files.written


class _MetadataUnpickler(pickle._Unpickler):  # whose instructions can be replaced
    """See [Note: pickles]. Calls only `_MAKERS`, and sets only fields of new `_RECORDS`, to values of their types."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    load_mark: Callable[[], None]

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name.endswith("Path"):
            return lambda *_: None  # the path that it was written to; unused
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in _MAKERS:
            return _MAKERS[module, name]
        what = f"{module}.{name}"[:80]
        raise CheckpointCorrupt(f"it contains {what!r}, which no checkpoint needs, so it is not read")

    def refuse(self) -> None:
        raise CheckpointCorrupt("it has an instruction that no checkpoint needs, so it is not read")

    def set_fields(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) not in _RECORDS:
            raise TypeError(f"it sets attributes of a {type(record).__name__}")
        if isinstance(state, tuple):
            state = dict(zip((each.name for each in fields(record)), state, strict=True))
        for name in state.keys() & {each.name for each in fields(record)}:  # other versions may have others
            value, kind = state[name], _FIELDS.get((type(record), name)) or _FIELDS.get(name, object)
            if not isinstance(value, kind):
                raise TypeError(f"its {type(record).__name__} has a {type(value).__name__} as {name}")
            vars(record)[name] = value

    def set_items(self) -> None:
        pairs = self.pop_mark()
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, (str, MetadataIndex)):  # to hash tuples of tuples may take forever
                raise TypeError(f"it has a {type(key).__name__} as a key")
            self.stack[-1][key] = value

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.load_mark()
        self.stack += key, value
        self.set_items()

    _kept = (
        "PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE GLOBAL "
        "STACK_GLOBAL REDUCE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT MEMOIZE "
        "BINPUT LONG_BINPUT BINGET LONG_BINGET"
    )
    _codes = tuple(getattr(pickle, name)[0] for name in _kept.split())
    dispatch: dict[int, Any] = dict.fromkeys(range(256), refuse)
    dispatch |= {code: pickle._Unpickler.dispatch[code] for code in _codes}
    dispatch |= {pickle.BUILD[0]: set_fields, pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items}
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]]


def _size(sizes: Any) -> torch.Size:
    """No tensor has more dimensions, or longer ones; and of larger numbers many have one hash."""
    if len(sizes) > 64 or any(abs(each) >= 2**60 for each in sizes):
        raise ValueError("it has a size that no tensor has")
    return torch.Size(sizes)


_FIELDS: dict[Any, Any] = {"fqn": str, "relative_path": str, "length": int, (_StorageInfo, "offset"): int}
_FIELDS |= {(MetadataIndex, "offset"): (torch.Size, type(None)), "index": (int, type(None))}
_FIELDS |= dict.fromkeys(("size", "sizes", "offsets"), torch.Size)
_FIELDS |= {"chunks": list, "state_dict_metadata": dict, "storage_data": dict}
_MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]
_RECORDS = (Metadata, MetadataIndex, _StorageInfo, TensorStorageMetadata, records.BytesStorageMetadata)
_RECORDS += (records.ChunkStorageMetadata, records.TensorProperties, records.StorageMeta)
_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(kind.__module__, kind.__name__): partial(object.__new__, kind) for kind in _RECORDS},
    (records.__name__, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMATS.__getitem__,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda _: torch.strided,
    ("collections", "OrderedDict"): {}.copy,  # an empty one, without arguments
}


def read_metadata(folder: Path, name: str = METADATA) -> Metadata:
    """A checkpoint's metadata. Raises OSError, and CheckpointCorrupt for a file that DCP did not write."""
    path = folder / name
    data = path.read_bytes()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it is a {type(metadata).__name__}")
        for file in {info.relative_path for info in metadata.storage_data.values()}:
            if Path(file).name != file or file in ("", ".."):
                raise ValueError(f"it names {file[:80]!r}, which is not a file in its folder")
        if any(min(info.offset, info.length) < 0 for info in metadata.storage_data.values()):
            raise ValueError("it has values before the begin of a file")
        if name == METADATA:
            _check_chunks(metadata)
    except Exception as error:  # an unpickler may raise anything
        raise CheckpointCorrupt(f"{path} can't be read as a checkpoint's list of contents: {error}") from error
    if metadata.planner_data is None:
        metadata.planner_data = {}
    return metadata


def check_sizes(folder: Path, metadata: Metadata) -> None:
    """Raises CheckpointCorrupt for a file that is missing or shorter than the values in it."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        now = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
        if not path.is_file() or path.stat().st_size < end:
            raise CheckpointCorrupt(f"{path} {now}, and values of {folder} are in its first {end}")


def _check_chunks(metadata: Metadata) -> None:
    """Raises ValueError unless chunks are within their tensors, fill them without overlap, and each have data."""
    tensors = tensors_of(metadata)
    if len({id(each.chunks) for each in tensors.values()}) < len(tensors):
        raise ValueError("tensors share a list of chunks")  # so a short file would take long
    plans = [SavePlan([]), SavePlan([])]  # one would be checked less
    problems = _validate_global_plan(plans, metadata)
    if problems is False:  # torch before 2.12 says why in its log only
        problems = [name for name, each in tensors.items() if not _validate_global_plan(plans, Metadata({name: each}))]
    if problems not in (True, []):
        raise ValueError(f"its chunks don't fit its tensors: {problems}")
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if math.prod(chunk.sizes) and MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise ValueError(f"{name} has no data for its chunk of {[*chunk.sizes]} at {[*chunk.offsets]}")


class _WeightsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_into(folder: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Fills the tensors of a flat state dict in place, and replaces its other values. Needs no other rank.

    Tensors may be sharded in any way. Raises CheckpointCorrupt, OSError.
    """
    planner = _WeightsOnly(flatten_state_dict=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError) as error:
        # Without torch's message, which advises to run the pickle.
        raise CheckpointCorrupt(f"{folder} has values that can't be read ({type(error).__name__})") from error


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name: their shapes, dtypes and chunks."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
