from ..jobs.data.tokenizer import load_tokenizer as load_tokenizer
from ..jobs.data.tokenizer import to_transformers as to_transformers
from ..jobs.data.tokenizer import train_tokenizer as train_tokenizer

__all__: list[str]
