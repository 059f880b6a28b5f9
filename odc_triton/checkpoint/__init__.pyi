from .adapter import with_adapter as with_adapter
from .pretrained import load_causal_lm as load_causal_lm
from .pretrained import load_pretrained_shards as load_pretrained_shards
from .pretrained import meta_causal_lm as meta_causal_lm
from .quantise import quantise_on_meta as quantise_on_meta
from .write_pretrained import save_pretrained as save_pretrained

__all__: list[str]
