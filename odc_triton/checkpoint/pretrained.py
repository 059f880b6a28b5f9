"""Loads weights from a Hugging Face folder, without a private copy of the model on any rank.

model = meta_causal_lm(model=folder)      # no weights
enable_packing(model); replace_layers(model); model = fully_shard(model)
load_pretrained_shards(model, folder)     # each rank reads its own rows
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.errors import CheckpointDiffers, in_a_line
from ..base.files import reading
from ..base.untyped import untyped
from ..engine.api import engine_of
from ..engine.module import below_wrappers, plain_class
from ..engine.parameter import ShardedParameter
from ..nn.operand import is_sharded
from .adapted import base_of, read_config
from .adapter import STARTS_AS_BASE
from .base_model import ADAPTER
from .failures import all_or_none, listed
from .parameters import PackedWeight, Take, sharded_parameters
from .pretrained_adapter import Merge, quietly
from .pretrained_files import PretrainedFiles, refuse_quantised, rows_of, weights_folder
from .pretrained_sources import WeightSource, are_equal, blocks, sources_of, values_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_causal_lm(*, model: str | None, init: str | None) -> nn.Module:
    """A transformers causal LM in fp32, on this rank alone.

    model: a folder or hub id, for its weights.
    init: a config instead, for random weights.
    """
    _require_one(model, init)
    if init is not None:
        return _made(read_config(init), init)
    assert model is not None, "of the two one is given"
    if (base := base_of(model)) is not None:
        raise ValueError(
            f"{model} has an adapter, which is not merged into a whole model: give the folder of its base, {base}"
        )
    config = read_config(model)
    refuse_quantised(model, config.to_dict())
    auto = auto_class(config)
    with reading(str(model)), quietly():
        return auto.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)


def _require_one(model: str | None, init: str | None) -> None:
    if (model is None) == (init is None):
        raise ValueError("give either model (pretrained) or init (random weights)")


def auto_class(config: Any, *, scores: bool = False) -> Any:
    """transformers' auto class for `config`: for models that see images, where it is one, else for causal LMs, as which
    those of Qwen3.5 have no tower. `scores`: for sequence classifiers.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if scores:
        return transformers.AutoModelForSequenceClassification
    if type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def meta_causal_lm(*, model: str | None = None, init: str | None = None, scores: bool = False) -> nn.Module:
    """A transformers causal LM in fp32 on the meta device, which `fully_shard` gives random weights, the same for any
    number of ranks; `load_pretrained_shards` loads real ones.

    For the config of a model that sees images it is the whole one, of AutoModelForImageTextToText. Of the model's files
    it reads the names: quantised weights are refused, and parameters that the config ties, and the files have with
    different values, are not tied, as by `from_pretrained`. So with those that an adapter makes differ.

    model: a folder or hub id.
    init: a config instead.
    scores: a sequence classifier of one label instead, whose score the files may lack.
    """
    _require_one(model, init)
    if init is not None:
        config = read_config(init)
        config._name_or_path = ""  # only the run's checkpoints have these weights
        for each in (config, config.get_text_config()):  # which are plain numbers
            vars(each).pop("quantization_config", None)
        with torch.device("meta"):
            return _made(config, init, int(scores))
    assert model is not None, "of the two one is given"
    made = _meta_base(model, int(scores))
    if (base := base_of(model)) is not None:
        merge = Merge(made, model, base)
        for target, source in list(made.all_tied_weights_keys.items()):
            if merge.differ(target, source):
                _untie(made, target)
        made.config._name_or_path = made.name_or_path = str(model)
    return made


def _meta_base(model: str, labels: int = 0) -> PreTrainedModel:
    """`meta_causal_lm(model=model)` without its adapter, or with `labels` a sequence classifier of so many."""
    from transformers import GenerationConfig

    with torch.device("meta"):
        made = _made(read_config(model), model, labels)
    with contextlib.suppress(FileNotFoundError):  # it has no weights, and may get others
        _tie_as_in(PretrainedFiles(weights_folder(model)), made)
    if made.can_generate():
        with contextlib.suppress(OSError):  # if there is none, the one from its config stays
            made.generation_config = GenerationConfig.from_pretrained(base_of(model) or model)
    return made


def _made(config: Any, source: str, labels: int = 0) -> PreTrainedModel:
    """A causal LM of `config`, read from `source`, with random weights; with `labels` a classifier, as `_meta_base`."""
    if labels:
        config.num_labels = labels
    try:
        return auto_class(config, scores=labels > 0).from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # a bad field may make the model's code raise anything
        raise ValueError(
            f"{source}: transformers can't make a {'sequence classifier' if labels else 'causal LM'} of this config "
            f"({type(error).__name__}: {error}); correct its fields"
        ) from error


def _tie_as_in(files: PretrainedFiles, made: PreTrainedModel) -> None:
    """Unties what the files have with different values, in the config too: other engines know only that."""
    sources, _ = sources_of(made, files, made.state_dict().keys())
    for target, source in list(made.all_tied_weights_keys.items()):
        if not {target, source} <= sources.keys() or are_equal(files, sources[target], sources[source]):
            continue
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(
                f"{files.folder}: the config ties {target} to {source} and the files have both, which differ: "
                f"they are not tied",
                stacklevel=3,
            )
        _untie(made, target)


def _untie(made: PreTrainedModel, target: str) -> None:
    owner, _, name = target.rpartition(".")
    module = made.get_submodule(owner)
    value = torch.empty_like(old := getattr(module, name))
    setattr(module, name, nn.Parameter(value) if isinstance(old, nn.Parameter) else value)
    del made.all_tied_weights_keys[target]
    for config in (made.config, made.config.get_text_config()):
        config.tie_word_embeddings = False


def transformers_part(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """(prefix, module) of the transformers model in `model`: itself, or inside an adapter's wrapper.

    Raises TypeError if there is none.
    """
    from transformers import PreTrainedModel

    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return f"{name}." if name else "", module
    raise TypeError(f"{type(model).__name__} is not a transformers model: load and save its state_dict() instead")


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model of a sharded transformers model's class, on the meta device, tied, with a copy of its config."""
    cls: Any = plain_class(model) if is_sharded(model) else type(model)
    with torch.device("meta"):
        empty = cls(copy.deepcopy(model.config))
    empty.tie_weights()
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        empty._weight_conversions = conversions
    return empty


def expect_weights(model: nn.Module) -> None:
    """`load_pretrained_shards` will follow: until then `fully_shard` leaves what is on the meta device 0, and draws no
    random numbers for it, but for a classifier's score, which the files may lack."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not _may_lack(model, name):
            vars(parameter)["_is_hf_initialized"] = True


def _is_classifier(model: nn.Module) -> bool:
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(transformers_part(model)[1], GenericForSequenceClassification)


def _may_lack(model: nn.Module, name: str) -> bool:
    """True for a parameter that keeps its random values where the files have none: of a sequence classifier's score."""
    return _is_classifier(model) and name.removeprefix(transformers_part(model)[0]).startswith("score.")


@torch.no_grad()
def load_pretrained_shards(model: nn.Module, source: str | Path) -> None:
    """Fills a sharded transformers model, also below PEFT's adapters, from safetensors. Collective.

    Each rank reads its own rows of each tensor, one tensor at a time; where transformers merges several into one
    (experts), one result at a time. Values are cast to the masters' dtype. Adapters' weights stay as they are, but a
    classifier's score inside of `with_adapter` begins as the files have it. An adapter in `source` is merged into its
    base, one layer at a time. Errors come on every rank, before anything is overwritten. Warns of tensors in the files
    that the model does not have.

    model: what `fully_shard` returned.
    source: a folder or a hub id.

    Raises CheckpointDiffers if names or shapes are another model's, CheckpointCorrupt for damaged files,
    CheckpointFailed with the cause for pickled (.bin) or missing ones.
    """
    engine = engine_of(model)
    purpose = "load pretrained weights"
    with all_or_none(engine, purpose):
        engine.refuse_borrowed("load_pretrained_shards", "load them into the base")
        files = PretrainedFiles(weights_folder(source))
        places = _places(model)
        _, part = transformers_part(model)
        sources, unexpected = sources_of(empty_copy(part), files, places.keys())
        base = base_of(source)
        labels = (_is_classifier(model) and part.config.num_labels) or 0
        merge = None if base is None else Merge(_meta_base(str(source), labels), source, base)
        changed = [] if merge is None else [name for name in merge.changed(sources) if name in places]
        known = sources.keys() | {*changed}
        places = {name: each for name, each in places.items() if name in known or not _may_lack(model, name)}
        of_adapter = {name for name in changed if name not in sources}
        _check({name: each for name, each in places.items() if name not in of_adapter}, sources, files, part, merge)
        engine.drain(purpose)
    if base is not None and engine.rank == 0:
        kind = "has an adapter next to its model" if base == str(source) else f"is an adapter of {base}"
        print(f"{source} {kind}: its weights are merged into the model", flush=True)

    def read(name: str) -> torch.Tensor:
        return dict(values_from(sources[name], name, part, files.read))[name](None)

    fills: dict[str, Sequence[Callable[[Take], None]]] = {
        name: place.steps if isinstance(place, PackedWeight) else (partial(_fill, place),)
        for name, place in places.items()
    }

    def values(step: int) -> Iterator[tuple[str, Take]]:
        for target, source_of in sources.items():
            if not step or step < len(fills.get(target, ())):
                of_target = values_from(source_of, target, part, files.read)
                yield from ((name, take) for name, take in of_target if name not in changed)
        for name in changed:
            if merge is not None and step < len(fills[name]):
                yield name, partial(rows_of, merge.whole(name, read))

    for step in range(max(map(len, fills.values()))):
        engine.publication.wait()  # what the last step has written is readable
        with engine.publication.writing(), all_or_none(engine, purpose):
            for name, take in values(step):
                for fill in fills[name][step : step + 1]:
                    fill(take)
    if unexpected and engine.rank == 0:
        warnings.warn(
            f"{source} has {len(unexpected)} tensors that the model does not have: {listed(unexpected)}", stacklevel=2
        )


Place = ShardedParameter | PackedWeight | torch.Tensor


def _places(model: nn.Module) -> dict[str, Place]:
    """Everything to fill, by its name in the plain transformers model; a tied parameter by each of its names."""
    prefix, part = transformers_part(model)
    parameters = sharded_parameters(model)
    places: dict[str, Place] = {}
    for name, value in part.named_parameters(remove_duplicate=False):
        if not (prefix and ADAPTER.search(f".{name}")):
            places[plain_name(name)] = parameters.get(id(value), value)
    for name, wrapper in part.named_modules():
        for trained in untyped(wrapper).modules_to_save.values() if STARTS_AS_BASE in vars(wrapper) else ():
            own = trained.named_parameters(prefix=plain_name(name))
            places |= {key: parameters.get(id(value), value) for key, value in own}
    if "bitsandbytes" in sys.modules:
        from .packing import packed_weights

        for name, own, weight in packed_weights(part, parameters):
            for key in own:
                places.pop(plain_name(key), None)
            places[plain_name(name)] = weight
    persistent = {plain_name(name) for name in part.state_dict()}
    buffers = ((plain_name(name), value) for name, value in part.named_buffers())
    places |= {name: value for name, value in buffers if name in persistent}
    return places


def plain_name(name: str) -> str:
    """The name without those of wrappers: `base_layer`, PEFT's of an adapted layer, and torch's."""
    return below_wrappers(name).replace(".base_layer.", ".")


def _check(
    places: dict[str, Place],
    sources: dict[str, WeightSource],
    files: PretrainedFiles,
    part: PreTrainedModel,
    merge: Merge | None = None,
) -> None:
    differences = []
    shapes: dict[str, tuple[int, ...]] = {}
    given = {id(places[target]) for target in sources}
    for target, source in sources.items():
        try:
            made = values_from(source, target, part, lambda name, _: torch.empty(files.shape(name), device="meta"))
            shapes |= {name: tuple(take(None).shape) for name, take in made}
        except Exception as error:  # of its tensors' number or shapes, of any class
            differences.append(f"{target} can't be made of {', '.join(source.names[:3])}, … ({in_a_line(error)})")
    given |= {id(places[name]) for name in shapes if name in places}
    for name, place in places.items():
        if id(place) not in given:
            differences.append(f"{name} is not in the files")
            given.add(id(place))
    for name, shape in shapes.items():
        if name not in places:
            differences.append(f"{name} is not in the model")
        elif shape != (wanted := tuple(places[name].shape)):
            differences.append(f"{name} is {list(shape)} in the files and {list(wanted)} here")
    filled: dict[int, str] = {}
    for target, source in sources.items():
        place = places[target]
        twin = filled.setdefault(id(place), target)
        rows = slice(*place.shard.master_rows) if isinstance(place, ShardedParameter) else None
        apart = merge is not None and merge.differ(twin, target)
        if twin != target and (apart or not are_equal(files, sources[twin], source, rows)):
            differences.append(
                f"{twin} and {target} differ, and are one parameter here: make the model by meta_causal_lm(model=…), "
                f"which does not tie them"
            )
    if differences:
        raise CheckpointDiffers(f"the files are of another model: {listed(differences)}")


def _fill(place: ShardedParameter | torch.Tensor, take: Take) -> None:
    for own, rows in _own(place):
        if (value := take(rows)).shape != own.shape:  # which copy_ would repeat
            raise CheckpointDiffers(f"{list(value.shape)} values for {list(own.shape)}")
        own.copy_(value)


def require_base(model: nn.Module, source: str | Path) -> None:
    """Raises CheckpointDiffers if what this rank has below the model's adapters is not in the files of `source`. Packed
    weights can't be compared."""
    files, places = PretrainedFiles(weights_folder(source)), _places(model)
    _, part = transformers_part(model)
    sources, others = sources_of(empty_copy(part), files, places.keys())
    _check(places, sources, files, part)
    for target, made_of in sources.items():
        for name, take in values_from(made_of, target, part, files.read):
            if not isinstance(place := places[name], PackedWeight):
                are_same = (torch.equal(own.cpu(), take(rows).to(own.dtype)) for own, rows in _own(place))
                others += [] if all(are_same) else [name]
    if others:
        raise CheckpointDiffers(f"{others[0]} is not as in {source}")


def _own(place: ShardedParameter | torch.Tensor) -> Iterator[tuple[torch.Tensor, slice | None]]:
    """What this rank has of it, a block of rows at a time, and which rows; None: all."""
    if isinstance(place, torch.Tensor):
        yield place, None
        return
    master, (first, end) = place.shard.master, place.shard.master_rows
    for rows in blocks(first, end, master.shape):
        yield master[rows.start - first : rows.stop - first], rows
