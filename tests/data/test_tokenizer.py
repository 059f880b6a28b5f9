"""The tokenizer: trained, stored, and those of models."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from bench.stdlib_corpus import build_corpus
from odc_triton.jobs.data.tokenizer import (
    COMPLETION,
    END,
    PROMPT,
    SPECIAL_TOKENS,
    TextEncoder,
    load_tokenizer,
    read_tokenizer,
    to_transformers,
    train_tokenizer,
)
from tests.support.records import samples_of, write_lines
from tests.support.tokenized import tokenize_file


@pytest.fixture(scope="module")
def some_corpus() -> list[dict[str, str]]:
    """A folder of the standard library, so that the test takes no second."""
    return build_corpus(Path(sysconfig.get_path("stdlib"), "asyncio"))[0]


@pytest.fixture(scope="module")
def trained(some_corpus):
    return train_tokenizer((record["completion"] for record in some_corpus), vocab_size=600)


def test_training_is_repeatable_and_keeps_its_size(trained, some_corpus):
    texts = [record["completion"] for record in some_corpus]
    assert train_tokenizer(texts, vocab_size=600).to_str() == trained.to_str()
    assert trained.get_vocab_size() == 600
    assert [trained.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert train_tokenizer([], vocab_size=300).get_vocab_size() == 260
    with pytest.raises(ValueError, match=r"vocab_size is 259 tokens; .* need 260"):
        train_tokenizer(texts, vocab_size=259)


def test_file_and_transformers_give_the_same_samples(trained, tmp_path):
    path = write_lines(
        tmp_path / "data.jsonl", {"prompt": "def f():\n", "completion": "    return 1\n"}, {"text": "import é"}
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    to_transformers(trained).save_pretrained(tmp_path / "model")
    expected = samples_of(tokenize_file(path, TextEncoder.of(trained)))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for tokenizer in (loaded, to_transformers(loaded), auto):
        assert samples_of(tokenize_file(path, TextEncoder.of(tokenizer))) == expected
    (ids, labels), (text_ids, text_labels) = expected
    assert loaded.decode(ids, skip_special_tokens=False) == (f"{PROMPT}def f():\n{COMPLETION}    return 1\n{END}")
    learned = [label for label in labels if label != -100]
    assert loaded.decode(learned, skip_special_tokens=False) == f"    return 1\n{END}"
    assert ids[-len(learned) :] == learned
    assert text_labels == text_ids
    assert (auto.eos_token, auto.pad_token_id) == (END, 1)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    """transformers makes an empty one of it, or raises, by its class."""
    for kind in ("qwen2", "gpt2", "mbart", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=rf"^{tmp_path} has no tokenizer(.|\n)*[:;] give --tokenizer$"):
            read_tokenizer(tmp_path)
    for name, whole in {
        "bytes": transformers.ByT5Tokenizer(),  # which has no files of tokens
        "added": transformers.PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(["a"]), eos_token=END),
    }.items():
        whole.add_tokens(["more"])
        whole.save_pretrained(tmp_path / name)
        assert read_tokenizer(tmp_path / name).get_vocab() == whole.get_vocab()


def test_model_tokenizer_keeps_its_beginning_of_sequence(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    options = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = TextEncoder.of(transformers.PreTrainedTokenizerFast(tokenizer_object=words, **options))
    assert (plain.before_text, plain.before_prompt, plain.before_completion) == ((), (), ())
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begun = TextEncoder.of(transformers.PreTrainedTokenizerFast(tokenizer_object=words, **options))
    assert (begun.before_text, begun.before_prompt, begun.before_completion) == ((0,), (0,), ())
    assert (begun.encode_batch(["a a"]), begun.end_id) == ([[2, 2]], 1)
    del options["eos_token"]
    with pytest.raises(ValueError, match="has no end-of-sequence token: set its eos_token"):
        TextEncoder.of(transformers.PreTrainedTokenizerFast(tokenizer_object=words, **options))
    with pytest.raises(ValueError, match=r"has no <\|end\|> token, so odc-triton did not make it"):
        TextEncoder.of(words)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer.json: "):
        load_tokenizer(tmp_path / "tokenizer.json")


TEXTS = ["some words, some more words", "", f"{END} written out"]


def test_a_file_that_pads_and_cuts_does_neither_here(trained):
    want = to_transformers(trained)(TEXTS, add_special_tokens=False)["input_ids"]
    tokenizer = to_transformers(trained)
    encoder = TextEncoder.of(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=40)
    assert encoder.encode_batch(TEXTS) == want
    assert min(map(len, want)) == 0
    assert 3 < max(map(len, want)) < 40


@pytest.mark.parametrize("split", [False, True])
def test_a_tokenizer_with_code_or_settings_of_its_own_is_asked_itself(trained, split):
    class Reversed(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments, **options):
            found = super()._encode_plus(*arguments, **options)
            found["input_ids"] = [ids[::-1] if isinstance(ids, list) else ids for ids in found["input_ids"]]
            return found

    kind = PreTrainedTokenizerFast if split else Reversed
    tokenizer = kind(tokenizer_object=trained, eos_token=END, split_special_tokens=split)
    want = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert TextEncoder.of(tokenizer).encode_batch(TEXTS) == want
    assert want != to_transformers(trained)(TEXTS, add_special_tokens=False)["input_ids"]


def spaced_tokenizer(kind: str):
    """As Llama 2's tokenizer.json puts a space before a text, or as RoBERTa's; with merges across words."""
    rust = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token="<unk>"))
    rust.pre_tokenizer, rust.decoder = {
        "metaspace": (
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        ),
        "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    }[kind]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    rust.train_from_iterator(["Q: 2+2= 4", "f(x)", "yes and no"] * 9, trainer)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SPACED = [
    ("Q: 2+2=", "4"),
    ("Q: 2+2=", " 4"),
    ("Q: ", "4"),
    ("yes", " and no"),
    ("f(", "x)"),
    ("", "yes"),
    ("f", "é\n"),
]


@pytest.mark.parametrize("kind", ["metaspace", "bytes"])
def test_no_space_comes_between_prompt_and_completion(tmp_path, kind):
    """What the whole text's tokens are, and what is learned, as in TRL's SFTTrainer."""
    tokenizer = spaced_tokenizer(kind)
    path = write_lines(tmp_path / "data.jsonl", *({"prompt": one, "completion": two} for one, two in SPACED))
    samples = samples_of(tokenize_file(path, TextEncoder.of(tokenizer)))
    for (prompt, completion), (ids, labels) in zip(SPACED, samples, strict=True):
        assert tokenizer.decode(ids) == f"<s> {prompt}{completion}</s>"
        before, whole = tokenizer(prompt)["input_ids"], tokenizer(f"{prompt}{completion}</s>")["input_ids"]
        same = next((at for at, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), len(before))
        assert (ids, labels) == (whole, [-100] * same + whole[same:])
