"""From packs of samples to a model's input tensors, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch

from ..plan.entries import Segment
from ..plan.fields import IGNORED
from ..plan.plan import MinibatchPacks
from ..plan.queue import QueuedPacks
from .image_fields import PackImages, SampleImages, join

# Inputs of transformers' models that packs have no place for.
_REFUSED = ("inputs_embeds", "seq_idx", "decoder_input_ids", "encoder_outputs", "input_features", "past_key_values")


class PackedDataset(torch.utils.data.Dataset):
    """A map-style data set that is indexed by packs: `packed[[3, 1]]` is `[dataset[3], dataset[1]]`.

    With it, a DataLoader whose `batch_sampler` is a `MinibatchSampler` fetches a list of packs per minibatch. A
    `Segment` in a pack gives its sample with the segment under "segment", which `pack_collate` cuts out.

    dataset: gives a sample for an index.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, pack: Sequence[int | Segment]) -> list[Any]:
        return [
            {**self.dataset[entry.sample], "segment": entry} if isinstance(entry, Segment) else self.dataset[entry]
            for entry in pack
        ]

    def __getitems__(self, packs: Sequence[Sequence[int | Segment]]) -> MinibatchPacks:
        """Called by a DataLoader for a minibatch. Raises ValueError for a work queue."""
        if isinstance(packs, QueuedPacks):
            raise ValueError(
                "balance 'queue' assigns packs at run time, and a DataLoader would take them all at once: "
                "iterate over the sampler, and inside each minibatch over what it yields"
            )
        return MinibatchPacks.like(packs, (self[pack] for pack in packs))


class _PackTargets(PackImages, total=False):
    labels: torch.Tensor  # int64 [1, T], aligned with the ids
    shift_labels: torch.Tensor  # int64 [1, T], of the token after each: instead of labels, in a pack with segments
    segments: tuple[Segment | None, ...]  # of each document


class Pack(_PackTargets):
    """One microbatch as a model's input: documents end to end, T tokens. See `pack_collate`."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T], from 0 in each document; of a segment those in its sample
    cu_seq_lens_q: torch.Tensor  # int32 [documents + 1], from 0 to T; as what follows, a GPU would wait for it
    cu_seq_lens_k: torch.Tensor  # the same
    max_length_q: int  # tokens of the longest document
    max_length_k: int
    target_positions: torch.Tensor  # int64 [targets]: the positions whose next label is learned


P = TypeVar("P", bound=Mapping[str, Any])


def pack_collate(packs: Sequence[Sequence[dict[str, Any]]]) -> MinibatchPacks:
    """Per pack of samples one model input, its documents end to end. No packs give an empty list.

    A sample has `input_ids` and, optionally, `labels` aligned with them (-100: not learned), as lists or 1-D tensors of
    one length; without labels every token is learned. With images it has what its model's processor makes of them for
    one text, without the dimension of the batch: `pixel_values`, `image_grid_thw`, `pixel_attention_mask`, and
    `mm_token_type_ids` or `token_type_ids`, 1 for an image's tokens. With `position_ids` a sample may be several
    documents: as in transformers one begins where they don't go on by 1, and labels say whether its first token is
        learned. Keys that are no inputs of transformers' models are left out.

    A collated pack is a dict, T the pack's tokens. int64 tensors `[1, T]`: `input_ids`; `position_ids`, from 0 in each
    document; `labels`, aligned with `input_ids` as transformers has it (the model shifts them), -100 at each document's
    first token, which would otherwise be predicted from the document before. Where documents begin, by transformers'
    names: `cu_seq_lens_q` and `_k`, int32 `[documents + 1]` from 0 to T, `max_length_q` and `_k`, the longest one's
        tokens. For `summed_loss`: `target_positions`, whose next label is learned. `to_device` moves a pack.

    With images it has their fields, joined along dim 0; `mm_token_type_ids`, `[1, T]`; `image_blocks`, of each run of
    an image's tokens its document's first row, its first and the row after it; if they have grids `mrope_position_ids`,
    `[3, 1, T]`. Of a sample in segments only one has all of its images.

    With segments it has `segments`, a `Segment` or None for each document; positions that count in the sample; and
    instead of `labels` `shift_labels`, where position t has the label of the token after it, as a model that shifted
    them itself would lose the last target of every segment.

    packs: lists of samples, as a DataLoader gets them from `PackedDataset`.

    Returns the collated packs, as `minibatch(model, plan=…)` takes them: `tokens` are the packs' targets. Made of a
    MinibatchSampler's packs they have their `plan`; `split`, the part of it about segments, None if no segment reads
    another pack's; `samples`, the number of all ranks', 0 if it is unknown.

    Raises ValueError for an empty pack, a sample without tokens, ids that are not 1-D integers, labels of another
    length, other inputs of a model, a segment beyond its sample, a branch from a sample of the pack with other tokens,
    videos, and images that don't fit their tokens, one another or a segment, naming pack and sample.
    """
    made = MinibatchPacks.like(packs, (_collate(pack, at) for at, pack in enumerate(packs)))
    made.tokens = sum(len(pack["target_positions"]) for pack in made)
    return made


def to_device(pack: P, device: torch.device | str) -> P:
    """The pack with its tensors on `device`, copied through pinned memory, so the host does not wait for a GPU.

    The documents' bounds also stay on the host, for attention that runs document by document.
    """
    device = torch.device(device)
    here: Any = {}
    for name, value in pack.items():
        here[name] = to_device(value, device) if isinstance(value, Mapping) else value
        if isinstance(value, torch.Tensor):
            pinned = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
            here[name] = pinned.to(device, non_blocking=True)
            if name.startswith("cu_seq_lens") and value.device.type == "cpu":
                here[name]._odc_bounds = tuple(value.tolist())
    return here


def count_target_tokens(packs: Sequence[Mapping[str, Any]]) -> int:
    """The number of learned labels in collated packs: the terms of a summed loss over them."""
    return sum(int((pack["shift_labels" if "shift_labels" in pack else "labels"] != IGNORED).sum()) for pack in packs)


def _collate(pack: Sequence[dict[str, Any]], index: int) -> Pack:
    wrong = next((sample for sample in pack if not isinstance(sample, Mapping)), None)
    if wrong is not None and isinstance(pack, list):
        raise ValueError(f"pack {index} has a {type(wrong).__name__}: a sample is a dict with input_ids")
    if isinstance(pack, dict) or wrong is not None:
        raise ValueError(
            f"pack {index} is a {type(pack).__name__}, not a list of samples: wrap the data set in PackedDataset, "
            f"whose packs are lists of dicts"
        )
    if not pack:
        raise ValueError(f"pack {index} has no samples: leave it out of the list")
    input_ids, position_ids, labels, segments, parts = [], [], [], [], []
    texts: dict[int, torch.Tensor] = {}  # of samples in segments, whole
    for place, sample in enumerate(pack):
        where = f"pack {index}, sample {place}"
        if "input_ids" not in sample:
            raise ValueError(f"{where} has {sorted(sample)}: it needs input_ids")
        if sample.get("attention_mask") is not None and (torch.as_tensor(sample["attention_mask"]) != 1).any():
            raise ValueError(f"{where} is padded (its attention_mask is not all 1): packs take samples without padding")
        ids = _ids(sample["input_ids"], f"{where}: input_ids")
        targets = ids if sample.get("labels") is None else _ids(sample["labels"], f"{where}: labels")
        if len(targets) != len(ids):
            raise ValueError(
                f"{where}: {len(targets)} labels for {len(ids)} input_ids; give one label per token, "
                f"{IGNORED} where nothing is learned, not shifted"
            )
        start, stop, images = 0, len(ids), SampleImages.of(sample, len(ids), where)
        segments.append(segment := sample.get("segment"))
        if segment is not None:
            start, stop = segment.start, segment.stop
            if stop > len(ids):
                raise ValueError(f"{where}: {segment} are beyond its {len(ids)} tokens")
            texts[segment.sample] = ids
            segments[-1] = replace(segment, length=len(ids))
        if refused := [name for name in _REFUSED if sample.get(name) is not None]:
            raise ValueError(f"{where} has {refused[0]}, which packs can't give to the model: leave it out")
        positions, target = torch.arange(len(ids)), torch.cat([targets[1:], torch.tensor([IGNORED])])  # of the next one
        if sample.get("position_ids") is not None:
            positions = _ids(sample["position_ids"], f"{where}: position_ids")
            if len(positions) != len(ids) or (segment is not None and positions.tolist() != [*range(len(ids))]):
                raise ValueError(
                    f"{where}: {len(positions)} position_ids for {len(ids)} input_ids; give one per token, and to a "
                    f"sample that ranks share or that shares its prefix only those from 0 up"
                )
            segments += [None] * int((positions.diff() != 1).sum())  # one for each document
        parts.append((images, start, stop))
        input_ids.append(ids[start:stop])
        position_ids.append(positions[start:stop])
        labels.append(target[start:stop])
    for segment in segments:
        if segment is not None and segment.parent in texts:
            text, other = (texts[each][: segment.start] for each in (segment.sample, segment.parent))
            if not torch.equal(text, other):
                raise ValueError(
                    f"pack {index}: sample {segment.sample} branches from sample {segment.parent} at token "
                    f"{segment.start}, and their tokens before it differ: give find_relatives of these samples"
                )
    bounds = [0, *accumulate(map(len, input_ids))]
    positions, shifted = torch.cat(position_ids), torch.cat(labels)
    ends = torch.tensor(
        sorted({*bounds, *((positions.diff() != 1).nonzero().flatten() + 1).tolist()}), dtype=torch.int32
    )
    longest = int(ends.diff().max())
    made: Pack = {
        "input_ids": torch.cat(input_ids)[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "target_positions": (shifted != IGNORED).nonzero().flatten(),
        **join(parts, bounds, ends.tolist(), f"pack {index}"),
    }
    if any(segments):
        made["shift_labels"], made["segments"] = shifted[None], tuple(segments)
    else:
        made["labels"] = torch.cat([torch.tensor([IGNORED]), shifted[:-1]])[None]
    return made


def _ids(values: Any, name: str) -> torch.Tensor:
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError) as error:  # text, or lists in lists
        raise ValueError(f"{name} is no tensor ({error}); give a list or 1-D tensor of one or more integers") from error
    if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point():
        raise ValueError(
            f"{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}; "
            "give a list or 1-D tensor of one or more integers"
        )
    return ids.long()
