"""What can happen to a checkpoint: full disks, damage, hostile files, another run in its folder."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from odc_triton import full_parameters, fully_shard
from odc_triton.base.errors import CheckpointCorrupt, CheckpointDiffers, CheckpointFailed
from odc_triton.checkpoint.dcp import read_metadata
from odc_triton.checkpoint.folder import Manifest, read_state
from odc_triton.jobs.checkpoints.background import BackgroundCheckpoints
from odc_triton.jobs.checkpoints.steps import Checkpoints, verify
from tests.support import ranks
from tests.support.checkpointed import make, settle, train, unfinished, writers
from tests.support.deadlines import until
from tests.support.families import causal_lm
from tests.support.models import build

MODEL = "qwen2"


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(full_parameters(model))


def saved_twice(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, Checkpoints]:
    """A world of one in this process, with checkpoints of steps 1 and 2."""
    model, optimizer = make(MODEL, bf16=False)
    checkpoints = Checkpoints(folder, keep=3)
    for step in (1, 2):
        train(model, optimizer, MODEL, range(step - 1, step))
        checkpoints.save(model=model, optimizer=optimizer, state={"step": step}, step=step)
    return model, optimizer, checkpoints


def test_the_last_few_stay(tmp_path: Path) -> None:
    model, optimizer, _ = saved_twice(tmp_path)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (3, 1):  # the last is of a run that went on from an older one
        path = checkpoints.save(model=model, optimizer=optimizer, state={"step": step}, step=step)
        assert checkpoints.newest() == path
    assert [path.name for path in checkpoints.all()] == ["step-00000003", "step-00000001"]
    assert checkpoints.load(checkpoints.newest(), model=model, optimizer=None) == {"step": 1}
    assert unfinished(tmp_path) == []
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "manifest edited"])
def test_damage_is_named_and_an_older_one_used_where_asked_for(tmp_path: Path, damage: str) -> None:
    model, optimizer, checkpoints = saved_twice(tmp_path)
    newest = checkpoints.newest()
    assert newest.name == "step-00000002"
    shard, manifest = newest / "__0_0.distcp", newest / "manifest.json"
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    elif damage == "missing":
        shard.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    name = "manifest.json" if "manifest" in damage else "__0_0.distcp"
    before = _weights(model)
    with pytest.raises(CheckpointCorrupt, match=name):
        checkpoints.load(newest, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointCorrupt, match=name):
        verify(newest)
    assert all(torch.equal(value, before[key]) for key, value in _weights(model).items())  # nothing overwritten
    with pytest.raises(CheckpointCorrupt, match=name):
        checkpoints.newest()
    with pytest.warns(UserWarning, match=name):
        older = checkpoints.newest(fallback=True)
    assert older.name == "step-00000001"
    assert checkpoints.load(older, model=model, optimizer=optimizer) == {"step": 1}
    # What is saved from here on is the newest, whatever its number, and pushes out damaged ones first.
    saved = Checkpoints(tmp_path, keep=2).save(model=model, optimizer=optimizer, state={"step": 2}, step=2)
    verify(saved)
    assert Checkpoints(tmp_path, keep=2).newest() == saved


def test_nothing_there(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "new", keep=1).newest() is None
    assert Checkpoints(tmp_path / "new", keep=1).newest(fallback=True) is None
    model, optimizer = make(MODEL, bf16=False)
    with pytest.raises(CheckpointFailed, match="there is no such folder"):
        Checkpoints(tmp_path, keep=1).load(tmp_path / "step-00000009", model=model, optimizer=optimizer)


def test_another_architecture(tmp_path: Path) -> None:
    _, _, checkpoints = saved_twice(tmp_path)
    path = checkpoints.newest()
    other = fully_shard(build("llama"))
    before = _weights(other)
    with pytest.raises(
        CheckpointDiffers, match=r"another model than this .*q_proj.bias is not in this ODCLlama.*"
    ) as e:
        checkpoints.load(path, model=other, optimizer=None)
    assert "and 1 more" in str(e.value)  # two layers of three biases, five shown
    assert all(torch.equal(value, before[key]) for key, value in _weights(other).items())
    wide = fully_shard(causal_lm("Qwen2", intermediate_size=64))
    with pytest.raises(CheckpointDiffers, match=r"gate_proj.weight is \[48, 32\] .* and \[64, 32\] here"):
        checkpoints.load(path, model=wide, optimizer=None)
    with pytest.raises(CheckpointDiffers, match=r"is torch\.float32 .* torch\.bfloat16 here, which would round it"):
        checkpoints.load(path, model=fully_shard(build(MODEL).bfloat16().requires_grad_(False)), optimizer=None)
    double = fully_shard(build(MODEL).double())
    checkpoints.load(path, model=double, optimizer=None)  # nothing is lost
    model = fully_shard(build(MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(CheckpointDiffers, match=r"max_exp_avg_sq of model.embed_tokens.weight is not"):
        checkpoints.load(path, model=model, optimizer=optimizer)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(CheckpointDiffers, match=r"exp_avg of .* is not in this SGD"):
        checkpoints.load(path, model=model, optimizer=optimizer)
    assert not optimizer.state, "states that loading made would count as a step"


Plain = tuple[nn.Module, torch.optim.Optimizer, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests copy."""
    return saved_twice(tmp_path_factory.mktemp("saved"))[2].newest()


@pytest.fixture
def plain(tmp_path: Path, saved: Path) -> Plain:
    """A model, and a checkpoint of its like as FSDP2's scripts write it: with nothing to check it by."""
    path = tmp_path / "plain"
    shutil.copytree(saved, path, ignore=shutil.ignore_patterns("manifest.json", "state.json"))
    return *make(MODEL, bf16=False), path


def refused(plain: Plain, words: str, *, before_values: bool = True) -> str:
    """What is said of it when it is loaded; nothing is overwritten, if it is found before values are read."""
    model, optimizer, path = plain
    before = _weights(model)
    with pytest.raises(CheckpointCorrupt, match=words) as error:
        Checkpoints(path.parent / "mine", keep=1).load(path, model=model, optimizer=optimizer)
    assert not before_values or all(torch.equal(value, before[key]) for key, value in _weights(model).items())
    return str(error.value)


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("damage", ["lacking", "half", "beyond", "negative", "twice", "overlapping", "no data"])
def test_a_list_that_does_not_cover_its_tensors(plain: Plain, damage: str) -> None:
    path = plain[2]
    metadata = read_metadata(path)
    name = next(name for name in metadata.state_dict_metadata if name.endswith("layers.1.mlp.up_proj.weight"))
    chunks = metadata.state_dict_metadata[name].chunks
    (chunk,) = chunks
    rows, columns = chunk.sizes
    if damage == "lacking":
        chunks.clear()
    elif damage == "half":
        chunk.sizes = torch.Size((rows // 2, columns))
    elif damage == "beyond":
        chunk.sizes = torch.Size((rows + 1, columns))
    elif damage == "negative":
        chunk.offsets = torch.Size((-1, 0))
    elif damage == "twice":
        chunks.append(chunk)
    elif damage == "overlapping":  # as many elements as there are
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        chunk.sizes = torch.Size((rows // 2, columns))
        chunks.append(ChunkStorageMetadata(torch.Size((rows // 2 - 1, 0)), chunk.sizes))
        metadata.storage_data[MetadataIndex(name, chunks[1].offsets)] = place
    else:
        del metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(plain, r"up_proj\.weight")


@pytest.mark.parametrize("damage", ["missing", "a folder", "empty", "cut", "other bytes"])
def test_damage_without_a_manifest(plain: Plain, damage: str) -> None:
    """A file that is too short is named."""
    shard = plain[2] / "__0_0.distcp"
    content = shard.read_bytes()
    shard.unlink()
    if damage == "a folder":
        shard.mkdir()
    elif damage != "missing":
        shard.write_bytes({"empty": b"", "cut": content[:-1], "other bytes": b"x" * len(content)}[damage])
    said = {
        "empty": "has 0 bytes, and values",
        "cut": f"has {len(content) - 1} bytes, and",
        "other bytes": "can't be read",
    }
    assert "weights_only" not in refused(plain, said.get(damage, "is missing, and values"))


@pytest.mark.parametrize("step", [2, 3])
def test_links_and_files_in_the_way(tmp_path: Path, step: int) -> None:
    """A checkpoint that was moved away and linked is read, replaced and removed; what the link leads to stays."""
    model, optimizer, checkpoints = saved_twice(tmp_path / "run")
    saving = {"model": model, "optimizer": optimizer, "state": {}}
    kept = tmp_path / "kept"
    checkpoints.path_of(2).rename(kept)
    checkpoints.path_of(2).symlink_to(kept)
    assert checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer) == {"step": 2}
    Checkpoints(tmp_path / "run", keep=1).save(**saving, step=step)
    verify(kept)
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", f"step-{step:08d}"]
    for way in (Path.touch, lambda path: path.symlink_to("nowhere")):
        way(checkpoints.path_of(9))
        with pytest.raises(CheckpointFailed, match="step-00000009 is in the way: it is not a folder; remove it"):
            checkpoints.save(**saving, step=9)
        assert sorted(os.listdir(tmp_path / "run")) == [".lock", f"step-{step:08d}", "step-00000009"]
        checkpoints.path_of(9).unlink()


def test_a_changed_bit_in_any_file_is_found(tmp_path: Path, saved: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / saved.name))
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    assert {".metadata", "__0_0.distcp", "random-0.json", "state.json"} <= {file.name for file in files}
    for file in files:
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointCorrupt, match=re.escape(file.name)):
            verify(path)
        file.write_bytes(good)
    verify(path)


def test_a_damaged_state_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Also on a rank that checks the digests of other files."""
    (tmp_path / "manifest.json").write_bytes(Manifest(number=0, step=1, world=1, files={}).to_json())
    for damaged in (b'{"step": 1', b"\xff{}", b"[]"):
        (tmp_path / "state.json").write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt, match=r"state\.json .*continue from an older one"):
            read_state(tmp_path)


def test_pickles_are_not_run(plain: Plain, tmp_path: Path) -> None:
    """In the metadata, as a record and inside one, and among the values that are no tensors."""
    path, mark = plain[2], tmp_path / "ran"
    good = (path / ".metadata").read_bytes()
    hostile = read_metadata(path)
    hostile.planner_data = {"x": _Bomb(mark)}
    for bad in (_Bomb(mark), [read_metadata(path), _Bomb(mark)], hostile):
        (path / ".metadata").write_bytes(pickle.dumps(bad))
        refused(plain, r"posix\.mkdir")
        assert not mark.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert mark.exists()  # the test can fail: plain pickle runs it
    mark.rmdir()

    # A value that is no tensor: the learning rate.
    (path / ".metadata").write_bytes(good)
    metadata = read_metadata(path)
    index = next(index for index in metadata.storage_data if index.fqn.endswith("param_groups.0.lr"))
    torch.save(_Bomb(mark), path / "bomb.distcp")
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "bomb.distcp", 0, (path / "bomb.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(plain, "can't be read", before_values=False)
    assert not mark.exists()
    info.relative_path = "../../etc/passwd"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(plain, "not a file in its folder")


def _failing(rank: int, world: int, folder: Path, way: str, in_background: bool) -> tuple[str, list[int]]:
    """Saves steps 1 to 3; saving step 2 fails. A background save reports that at a later step."""
    model, optimizer = make(MODEL, bf16=False)
    checkpoints = Checkpoints(folder, keep=3)
    background = BackgroundCheckpoints(checkpoints, model=model)
    train(model, optimizer, MODEL, range(1))

    def save(step: int, state: dict) -> None:
        if not in_background:
            checkpoints.save(model=model, optimizer=optimizer, state=state, step=step)
            return
        background.save(optimizer=optimizer, state=state, step=step)  # raises nothing yet
        while not background.is_idle:
            train(model, optimizer, MODEL, range(1, 2))
            settle(background, model)

    save(1, {})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1 and way == "file too large":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    elif rank == 0 and way == "vanished":
        folder.rename(folder.with_name("away"))
    dist.barrier()
    with pytest.raises(CheckpointFailed) as failed:
        save(2, {"x": {1}} if way == "not JSON" else {})
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if rank == 0 and way == "vanished":
        folder.with_name("away").rename(folder)
    if rank == 0:
        assert [path.name for path in checkpoints.all()] == ["step-00000001"]
        assert unfinished(folder) == []
    assert background.is_idle
    assert writers() == []
    dist.barrier()
    save(3, {})
    return str(failed.value), failed.value.ranks


@pytest.mark.parametrize(
    ("way", "in_background", "words", "at_fault"),
    [
        ("file too large", False, "rank 1: File too large", [1]),
        ("file too large", True, r"rank 1: File too large: .*/\.step-00000002\.\w+\.saving/__1_0\.distcp", [1]),
        ("vanished", False, "rank 0: .* has vanished", [0]),
        ("vanished", True, "rank 0: .* has vanished; rank 1: No such file or directory: ", [0, 1]),
        ("not JSON", False, "rank 0: TypeError: Object of type set is not JSON serializable", [0]),
        ("not JSON", True, "rank 0: TypeError: Object of type set is not JSON serializable", [0]),
    ],
)
def test_a_rank_that_can_not_write(
    tmp_path: Path, way: str, in_background: bool, words: str, at_fault: list[int]
) -> None:
    folder = tmp_path / "run"
    for text, named in ranks.run(_failing, 2, folder, way, in_background):
        assert re.search(rf"could not save .*step-00000002 \({words}", text), text
        assert text.endswith("repair the folder, and resume with --resume auto") is in_background
        assert named == at_fault
    assert [path.name for path in Checkpoints(folder, keep=3).all()] == ["step-00000001", "step-00000003"]
    for path in Checkpoints(folder, keep=3).all():
        verify(path)


def _hold(rank: int, world: int, folder: Path, seconds: float) -> None:
    kept = saved_twice(folder)  # the lock goes with the last of these
    time.sleep(seconds)
    del kept


def test_two_runs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from odc_triton.jobs.checkpoints import steps as module

    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.2)
    with ranks.start(_hold, 1, tmp_path, 600.0) as job:
        until((tmp_path / "step-00000002").exists)
        running = tmp_path / ".step-00000003.abcd1234.saving"  # as if it saved now
        running.mkdir()
        model, optimizer = make(MODEL, bf16=False)
        mine = Checkpoints(tmp_path, keep=1)
        with pytest.raises(CheckpointFailed, match=f"process {job.processes[0].pid} saves checkpoints in"):
            mine.save(model=model, optimizer=optimizer, state={}, step=9)
        assert running.exists()
        job.processes[0].kill()
        job.processes[0].join()
        mine.save(model=model, optimizer=optimizer, state={}, step=9)
        assert not running.exists()  # its owner was gone
