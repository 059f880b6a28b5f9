"""transformers' models on packed sequences: attention within documents, the loss that goes with it.

A *pack* is several documents side by side in one row, without padding: `input_ids`, `position_ids` (int64,
shape [1, T]; positions restart at every document) and `labels` (int64, [1, T]; -100 where nothing is to be
predicted, hence at the first token of every document, which no earlier token may predict).
"""

from .attention import PackingUnsupported, packed_attention, packed_mask
from .loss import model_inputs, summed_loss
from .packing import enable_packing

__all__ = [
    "PackingUnsupported",
    "enable_packing",
    "model_inputs",
    "packed_attention",
    "packed_mask",
    "summed_loss",
]
