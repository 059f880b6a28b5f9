"""What a run needs before its first step: folder, tokenizer, samples, a model to shard, low-rank adapters by PEFT.

Ranks take a while to start, and tokenising a large file takes longer. So `check_before_start` first checks what it can:
the model, the data's first records, the folder to write to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..balance import CostModel
from ..checkpoint import meta_causal_lm, with_adapter
from ..checkpoint.pretrained import require_weights
from ..comm.grid import grid_of
from ..data.dataset import DataOptions, TokenizedDataset, encode_records, split_samples
from ..data.prepared import prepare_data
from ..data.records import DataError
from ..data.sources import open_source
from ..data.store import contents
from ..data.tokenizer import TextEncoder, read_tokenizer
from ..hf import enable_packing
from ..sharding.agree import patient_meetings
from .run import Samples
from .run_folder import RunFolder
from .sft_options import SftOptions

_TELL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The same on every rank except `folder`, which only rank 0 has."""

    tokenizer: Any
    data: Samples
    evaluation: Samples | None
    largest_token: int
    identity: dict[str, Any]  # what a resumed run must have in common with this one
    folder: RunFolder | None
    goes_on: bool  # the folder holds a run to continue


def prepare(options: SftOptions, *, mesh: DeviceMesh) -> Prepared:
    """Rank 0 takes the folder, reads and tokenises once; the others load what it wrote. Collective."""
    rank, world = mesh.get_rank(), mesh.size()
    if options.lora_rank:
        require_peft()
    tokenizer = load_any_tokenizer(options)
    folder = RunFolder(options.out)

    def take() -> dict[str, Any]:
        folder.lock(resume=options.resume)
        try:
            # A sample's pieces may be on all ranks, each of at most --token-cap tokens.
            longest = options.token_cap * (world if options.split_sequences else 1)
            paths = _tokenize(options, tokenizer, folder, longest)
            identity = options.identity(world) | {"prepared": [contents(path) for path in paths]}
            return {"goes_on": folder.take(identity), "identity": identity, "paths": [str(path) for path in paths]}
        except BaseException:
            folder.release()
            raise

    taken = _on_rank_0(take, mesh, timedelta(minutes=options.timeout_minutes))
    sets = [TokenizedDataset.load(Path(path)) for path in taken["paths"]]
    largest = max(each.largest_token for each in sets)
    learned, evaluation = sets[0], sets[1] if len(sets) > 1 else None
    if options.eval_fraction:
        learned, evaluation = split_samples(sets[0], options.eval_fraction, seed=options.seed)
    if len(learned) < options.samples_per_rank * world:
        raise ValueError(
            f"{options.data} has {len(learned)} samples and one step takes {options.samples_per_rank} on each of "
            f"{world} ranks: lower --samples-per-rank, or give more data"
        )
    return Prepared(
        tokenizer=tokenizer,
        data=learned,
        evaluation=evaluation,
        largest_token=largest,
        identity=taken["identity"],
        folder=folder if rank == 0 else None,
        goes_on=taken["goes_on"],
    )


def load_any_tokenizer(options: SftOptions) -> Any:
    """The run's tokenizer: the given one, or the model's."""
    return read_tokenizer(options.tokenizer or options.model)


# What `_on_rank_0` raises on the other ranks: the first of these that rank 0's error is an instance of.
_ERRORS = (DataError, BlockingIOError, FileExistsError, FileNotFoundError, PermissionError, OSError, ValueError)


def _on_rank_0(make: Callable[[], dict[str, Any]], mesh: DeviceMesh, timeout: timedelta) -> dict[str, Any]:
    """Calls `make()` on rank 0, however long it takes, and returns its result (JSON) or raises its error on every rank.

    Raises RankLost.
    """
    message: dict[str, Any] = {}
    error: Exception | None = None
    with patient_meetings(grid_of(mesh), timeout) as meetings:
        if mesh.get_rank() == 0:
            try:
                message = {"made": make()}
            except (OSError, ValueError) as raised:
                error = raised
                number = next(i for i, kind in enumerate(_ERRORS) if isinstance(error, kind))
                message = {"error": [number, str(error)]}
        message = meetings.meet("rank 0 prepares the data", message)[0]
    if error is not None:
        raise error
    if "error" in message:
        number, text = message["error"]
        raise _ERRORS[number](text)
    return message["made"]


def _tokenize(options: SftOptions, tokenizer: Any, folder: RunFolder, longest: int) -> list[Path]:
    """Prepares the samples; returns their files."""
    paths = []
    wanted = DataOptions(max_tokens=longest, too_long=options.too_long)
    for source in (options.data, options.eval_data):
        if source is not None:
            try:
                data = prepare_data(
                    source,
                    TextEncoder.of(tokenizer),
                    wanted,
                    folder=folder.file("data"),
                    progress=_now_and_then(source),
                )
            except DataError as error:
                if "max_tokens" in str(error):
                    raise DataError(f"{error} (with --token-cap, --truncate and --drop-long)") from error
                raise
            print(f"{source}: {data.summary}", flush=True)
            paths.append(data.path)
    return paths


def _now_and_then(source: str) -> Callable[[int, float], None]:
    """Prints how far the preparation of `source` has got, every `_TELL_S` seconds."""
    told_s = time.monotonic()

    def tell(records: int, fraction: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            print(f"{source}: {records} records prepared, {fraction:.0%} of the data", flush=True)

    return tell


def build_model(options: SftOptions, prepared: Prepared, *, rank: int) -> tuple[nn.Module, CostModel]:
    """The model as it is before `fully_shard`, without weights, and what its samples cost."""
    torch.manual_seed(options.seed)
    model = meta_causal_lm(model=options.model, init=options.init)
    name_special_tokens(model, prepared.tokenizer)
    check_fit(model, prepared.data.lengths.max(), prepared.largest_token)
    cost = CostModel.from_config(model.config.get_text_config())
    enable_packing(model)
    replace(model, options, rank)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.lora_rank:
        model = add_adapters(model, rank=options.lora_rank, alpha=options.lora_alpha, targets=options.lora_targets)
    return model.train(), cost


def name_special_tokens(model: nn.Module, tokenizer: Any) -> None:
    """Gives the model's configs the tokenizer's special tokens that they lack: `generate` stops at the end token."""
    for config in (model.config.get_text_config(), model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if config is not None and getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name, None))


def precision(dtype: str) -> MixedPrecisionPolicy | None:
    """For "bf16", compute in bf16; masters and sums of gradients stay fp32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dtype == "bf16" else None


class LayerOptions(Protocol):
    """The options that training and profiling share."""

    model: str | None
    init: str | None
    replace_layers: bool
    fused_head: bool


def replace(model: nn.Module, options: LayerOptions, rank: int) -> None:
    """Replaces the layers that the options name. Raises ValueError for a head that can't be fused."""
    from ..nn.replace import replace_layers

    roles = ["attention", "embedding", "linear"] if options.replace_layers else []
    if options.fused_head:
        roles.append("head")
    replaced = replace_layers(model, roles=roles, verbose=bool(roles) and rank == 0)
    if options.fused_head and not replaced.swapped["head"]:
        raise ValueError(
            f"--fused-head: {options.model or options.init} has a head that can't be fused ("
            f"{'; '.join(f'{name}: {why}' for name, why in replaced.left.items())}); leave it out"
        )


def check_fit(model: nn.Module, longest: int, largest_token: int) -> None:
    """Raises ValueError for samples that the model can't take: unknown tokens, or too many for its positions."""
    config = model.config.get_text_config()
    if largest_token >= config.vocab_size:
        raise ValueError(
            f"the tokenizer made token {largest_token} and the model has only {config.vocab_size} (vocab_size): give "
            f"the model's own --tokenizer, or a larger vocab_size in --init"
        )
    places = getattr(config, "max_position_embeddings", None)
    if places is not None and longest > places:
        raise ValueError(
            f"the longest sample has {longest} tokens and the model takes at most {places} "
            f"(max_position_embeddings): set --token-cap {places}, and --truncate to cut longer samples"
        )


def require_peft() -> Any:
    """The peft package. Raises ImportError with the remedy."""
    try:
        import peft
    except ImportError as error:
        raise ImportError('--lora-rank needs peft; run: pip install "odc-triton[peft]"') from error
    return peft


def add_adapters(model: nn.Module, *, rank: int, alpha: float | None, targets: str) -> nn.Module:
    """The transformers model inside PEFT's wrapper, with adapters; the rest is frozen.

    `targets`: "all-linear", or names of layers with commas between. Raises ImportError without peft, ValueError for
    names that no layer has.
    """
    peft = require_peft()
    names = [name.strip() for name in targets.split(",") if name.strip()]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    try:
        return with_adapter(model, config)
    except ValueError as error:
        linear = {name.rpartition(".")[2]: None for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        raise ValueError(
            f"--lora-targets {targets}: {error} This model's linear layers: {', '.join(linear)}"
        ) from error


_RECORDS = 16  # of each source


def check_before_start(options: SftOptions) -> None:
    """Raises OSError and ValueError for what would fail later in the run. Leaves nothing except the folder `out`."""
    model = meta_causal_lm(model=options.model, init=options.init)
    if options.model is not None and Path(options.model).is_dir():
        require_weights(options.model)
    encoder = TextEncoder.of(load_any_tokenizer(options))
    for name in (options.data, options.eval_data):
        if name is not None:
            head = encode_records(list(islice(open_source(name), _RECORDS)), encoder, options.token_cap)
            check_fit(model, longest=0, largest_token=max(max(ids, default=0) for ids, _ in head))
    if options.lora_rank:
        add_adapters(model, rank=options.lora_rank, alpha=options.lora_alpha, targets=options.lora_targets)
    if options.resume not in ("auto", "never") and not Path(options.resume).is_dir():
        raise FileNotFoundError(
            f"--resume {options.resume}: there is no such folder; give auto, or a checkpoint: OUT/checkpoints/step-…"
        )
    folder = RunFolder(options.out)
    folder.lock(resume=options.resume)
    folder.release()
