"""A checkpoint's list of contents is a pickle: what DCP writes is read, and nothing else, whatever it tries."""

from __future__ import annotations

import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from odc_triton.base.errors import CheckpointCorrupt
from odc_triton.checkpoint.dcp import read_metadata

DCP = "torch.distributed.checkpoint"
CLASSES = (records.Metadata, records.MetadataIndex, records.TensorProperties, _StorageInfo, torch.Size, OrderedDict)
ENCODING = records._MEM_FORMAT_ENCODING
CLASSES += (ENCODING, pathlib.Path, pathlib.PosixPath, pathlib.PurePath, pathlib.PurePosixPath)


def _contents(file: str = "__0_0.distcp") -> records.Metadata:
    """As dcp.save leaves it: a tensor in two chunks, a value, where it was saved."""
    sizes = torch.Size((2, 3))
    chunks = [records.ChunkStorageMetadata(torch.Size((at, 0)), sizes) for at in (0, 2)]
    tensor = records.TensorStorageMetadata(
        records.TensorProperties(dtype=torch.bfloat16, requires_grad=True), torch.Size((4, 3)), chunks
    )
    places = {
        records.MetadataIndex("w", chunk.offsets, at): _StorageInfo(file, 24 * at, 24)
        for at, chunk in enumerate(chunks)
    }
    return records.Metadata(
        {"w": tensor, "lr": records.BytesStorageMetadata()},
        planner_data=OrderedDict(w=("model", "w", 0)),
        storage_data=places | {records.MetadataIndex("lr"): _StorageInfo(file, 48, 8, ["zstd"])},
        storage_meta=records.StorageMeta(checkpoint_id="here", save_id="1"),
        version="1.0.0",
    )


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_dcp_writes_is_read(tmp_path: Path, protocol: int) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_contents(), protocol=protocol))
    assert read_metadata(tmp_path) == _contents()
    elsewhere = _contents()
    elsewhere.storage_meta.checkpoint_id = tmp_path  # dcp.save(checkpoint_id=PATH)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(elsewhere, protocol=protocol))
    assert read_metadata(tmp_path).storage_data == elsewhere.storage_data


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _pairs(opened: bytes, body: bytes) -> bytes:
    """The tuple (t, t) of a tuple, 50 times: 2**50 elements, for whoever visits each."""
    return opened + b"q\x00h\x00\x86" * 50 + body


STATE = b"}" + _text("name") + _text("x") + b"s"
SLOTS = b"N" + STATE + b"\x86"
PROPERTIES = _global(f"{DCP}.metadata", "TensorProperties") + b")\x81"
MEMBER = _global(f"{DCP}.metadata", "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
HOSTILE: Mapping[str, tuple[bytes, str]] = {
    # BUILD: attributes of what every later caller in the process sees.
    **{
        f"{what} of {module}.{name}": (_global(module, name) + state + b"b", "sets attributes")
        for what, state in (("state", STATE), ("slots", SLOTS))
        for module, name in (
            *((f"{DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING")),
            *((f"{DCP}.filesystem", "_StorageInfo"), ("pathlib", "PosixPath"), ("collections", "OrderedDict")),
            *(("torch", "Size"), ("torch", "float32"), ("torch.serialization", "_get_layout")),
        )
    },
    "state of a member of an enum": (MEMBER + STATE + b"b", "sets attributes"),
    "state of another kind": (PROPERTIES + _text("x") + b"b", "can't be read"),
    "a field of another type": (
        _global(f"{DCP}.filesystem", "_StorageInfo") + b")\x81}" + _text("relative_path") + b"K\x01sb",
        "its _StorageInfo has a int as relative_path",
    ),
    # Calls.
    "a function": (_global("posix", "getpid") + b")R", "posix.getpid"),
    "a function by a dotted name": (b"\x8c\x05torch\x8c\x09os.getpid\x93)R", "torch.os.getpid"),
    "a module that torch would import": (_global("torch", "_dynamo"), "torch._dynamo"),
    "a new class by Enum": (MEMBER[:-4] + _text("New") + _text("A") + b"\x86R", "can't be read"),
    "keywords": (PROPERTIES[:-2] + b")}\x92", "instruction"),
    "an instance of old classes": (b"(" + f"i{DCP}.metadata\nMetadata\n".encode(), "instruction"),
    "copyreg's registry": (b"\x82\x01", "instruction"),
    "an object of the caller": (b"Pid\n", "instruction"),
    # Sizes that the file states and does not have.
    "64 GB of memo": (b"Nr\xff\xff\xff\x7f", "it is a NoneType"),
    "bytes to allocate": (b"\x96" + (2**40).to_bytes(8, "little"), "instruction"),
    # Time and memory that grow as 2**n.
    "a key": (b"}" + _pairs(b")", b"Ns"), "a tuple as a key"),
    "keys": (b"}(" + _pairs(b")", b"Nu"), "a tuple as a key"),
    "keys of a dict in one go": (b"(" + _pairs(b")", b"Nd"), "instruction"),
    "a set": (b"\x8f(" + _pairs(b")", b"\x90"), "instruction"),
    "an index": (
        _global(f"{DCP}.metadata", "MetadataIndex") + b")\x81}" + _text("fqn") + _pairs(b")", b"sb"),
        "has a tuple as fqn",
    ),
    "a dict of pairs": (_global("collections", "OrderedDict") + _pairs(b")", b"\x85R"), "can't be read"),
    "a layout": (_global("torch.serialization", "_get_layout") + _pairs(b")", b"\x85R"), "it is a layout"),
    "a memory format": (MEMBER[:-4] + _pairs(b")", b"\x85R"), "can't be read"),
    "paths of paths": (
        b"(" + _text("a") + b"q\x00" + (_global("pathlib", "PosixPath") + b"h\x00h\x00\x86Rq\x00") * 50 + b"l",
        "instruction",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_else_is(tmp_path: Path, what: str) -> None:
    def seen() -> list[dict[str, Any]]:
        return [dict(vars(kind)) for kind in CLASSES] + [dict(vars(member)) for member in ENCODING]

    body, message = HOSTILE[what]
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + body + b".")
    before = seen()
    with pytest.raises(CheckpointCorrupt, match=message):
        read_metadata(tmp_path)
    assert seen() == before


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", ".", "..", ""])
def test_files_outside_of_the_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_contents(file)))
    with pytest.raises(CheckpointCorrupt, match="not a file in its folder"):
        read_metadata(tmp_path)


def test_fields_that_a_record_does_not_have_are_passed_over(tmp_path: Path) -> None:
    """Another version's; and thousands of them would be copied into each record."""
    info = _StorageInfo("__0_0.distcp", 0, 4)
    vars(info)["of_another_version"] = "x"
    contents = records.Metadata({}, storage_data={records.MetadataIndex("w"): info}, planner_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(contents))
    (read,) = read_metadata(tmp_path).storage_data.values()
    assert not hasattr(read, "of_another_version")


def _shared_chunks(contents: records.Metadata) -> None:
    contents.state_dict_metadata["another"] = contents.state_dict_metadata["w"]


def _huge(contents: records.Metadata) -> None:
    contents.state_dict_metadata["w"].size = torch.Size((2**61 - 1, 3))


def _number(contents: records.Metadata) -> None:
    (index, *_) = contents.storage_data
    object.__setattr__(index, "offset", 2**61 - 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_shared_chunks, "tensors share a list of chunks"),  # each of many tensors would go through all of them
        (_huge, "it has a size that no tensor has"),  # numbers of one hash
        (_number, "its MetadataIndex has a int as offset"),
    ],
)
def test_a_short_file_that_would_take_long(tmp_path: Path, change: Any, said: str) -> None:
    contents = _contents()
    change(contents)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(contents))
    with pytest.raises(CheckpointCorrupt, match=said):
        read_metadata(tmp_path)
