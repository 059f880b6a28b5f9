"""The images of prepared samples: their encoded bytes, equal ones once, in the file of the samples.

So training does not read the images' own files. A file of samples without images has none of these arrays.

    `bytes`          [bytes] uint8          the images, one after the other
    `bytes_ends`     [images] int64
    `shown`          [shown] int64          the images of all samples, in order
    `shown_ends`     [samples] int64        of sample i: shown[shown_ends[i - 1] : shown_ends[i]]
    `values`         [units] int64          entries of pixel_values, by unit of attention in the tower
    `values_ends`    [samples] int64
    `floors`         [samples] int64        tokens up to and including the last image's
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from .store import Column
from .vision import SeenImages, VisionProcessor

_PREFIX = "picture_"
_ARRAYS = ("bytes", "bytes_ends", "shown", "shown_ends", "values", "values_ends", "floors")
_DTYPES = {name: np.dtype("uint8" if name == "bytes" else "int64") for name in _ARRAYS}
COLUMNS = {f"{_PREFIX}{name}": dtype for name, dtype in _DTYPES.items()}


class ShownWriter:
    """Columns that grow in files of `new_file`. In memory there are about 100 bytes for each different image."""

    def __init__(self, new_file: Callable[[], BinaryIO]) -> None:
        self._files = {name: new_file() for name in _ARRAYS}
        self._lengths = dict.fromkeys(_ARRAYS, 0)
        self._places: dict[bytes, int] = {}  # by digest

    def add(self, images: SeenImages | None, floor: int) -> None:
        """The next sample's."""
        for content in () if images is None else images.contents:
            digest = hashlib.blake2b(content, digest_size=16).digest()
            if digest not in self._places:
                self._places[digest] = len(self._places)
                self._write("bytes", np.frombuffer(content, np.uint8))
                self._write("bytes_ends", [self._lengths["bytes"]])
            self._write("shown", [self._places[digest]])
        self._write("shown_ends", [self._lengths["shown"]])
        self._write("values", () if images is None else images.values)
        self._write("values_ends", [self._lengths["values"]])
        self._write("floors", [floor])

    def columns(self) -> dict[str, Column]:
        """For `save_arrays`; none if no sample has an image."""
        sizes = self._lengths.items() if self._places else ()
        return {f"{_PREFIX}{name}": (self._files[name], _DTYPES[name], (size,)) for name, size in sizes}

    def _write(self, name: str, values: Any) -> None:
        array = np.asarray(values, _DTYPES[name])
        self._files[name].write(array.tobytes())
        self._lengths[name] += len(array)


class ShownImages:
    """The images of a data set's samples. `processor` makes their fields; None: they can't be read, but for those of
    `PreparedSamples.undecoded`, which are not `decoded`.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], processor: VisionProcessor | None, *, decoded: bool = True
    ) -> None:
        self.arrays, self.processor, self.decoded = arrays, processor, decoded

    def check(self, samples: int) -> None:
        """Raises ValueError if the arrays are of another number of samples."""
        for name in ("shown_ends", "values_ends", "floors"):
            if len(self.arrays[f"{_PREFIX}{name}"]) != samples:
                raise ValueError(f"the {name} of its images are not of {samples} samples")

    @property
    def values(self) -> list[list[int]]:
        ends = self.arrays["picture_values_ends"]
        return [each.tolist() for each in np.split(self.arrays["picture_values"], ends[:-1])]

    @property
    def floors(self) -> list[int]:
        return self.arrays["picture_floors"].tolist()

    def fields(self, sample: int, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """What the processor makes of a sample's images. Raises ValueError without one."""
        images = [self._row("bytes", each) for each in self._row("shown", sample)]
        if not images:
            return {}
        if not self.decoded:
            types = np.arange(len(input_ids)) < self.arrays["picture_floors"][sample]
            return {"pixel_values": np.concatenate(images), "mm_token_type_ids": types.astype(np.int64)}
        if self.processor is None:
            raise ValueError(
                f"sample {sample} has images: give TokenizedDataset.load the model's processor (`read_processor`)"
            )
        fields = self.processor.fields([each.tobytes() for each in images])
        return {**fields, "mm_token_type_ids": self.processor.types(input_ids)}

    def _row(self, name: str, index: int) -> np.ndarray:
        ends = self.arrays[f"{_PREFIX}{name}_ends"]
        return self.arrays[f"{_PREFIX}{name}"][ends[index - 1] if index else 0 : ends[index]]
