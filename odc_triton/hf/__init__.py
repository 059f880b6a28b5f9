"""transformers' models on packed sequences: attention within documents, and the loss.

A *pack* is several documents side by side in one row, without padding: `input_ids`, `position_ids` (int64,
shape [1, T]; positions restart at every document) and `labels` (int64, [1, T]; -100 where nothing is
predicted, hence at the first token of every document, which no earlier token may predict). A pack with segments of
samples has `shift_labels` and `segments` instead. Documents may have images, for the families in packs/images.py.
"""

from ..base.lazy import lazy_names

_OF_TRL = ("ODCDPOTrainer", "ODCGRPOTrainer", "ODCRewardTrainer", "ODCSFTTrainer")  # an optional package
_OF_AXOLOTL = ("AxolotlPlugin",)  # another
__getattr__, __dir__, __all__ = lazy_names(__name__, *_OF_TRL, *_OF_AXOLOTL)
