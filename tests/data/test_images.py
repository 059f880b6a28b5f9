"""Chat records with images, from a file to prepared samples, compared with transformers' processors."""

from __future__ import annotations

import base64
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from odc_triton.balance import find_relatives, values_of
from odc_triton.jobs.data import encode
from odc_triton.jobs.data.dataset import DataOptions, SampleSubset, TokenizedDataset, mixture, split_samples
from odc_triton.jobs.data.prepared import prepare_data
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.chats import CHATML
from tests.support.processors import FAMILIES, WITHOUT_TORCHVISION, encoded_image, image, make_processor
from tests.support.records import write_lines
from tests.support.tokenized import tokenize_file

pytestmark = WITHOUT_TORCHVISION

SIZES = {"a.png": (20, 12), "b.png": (9, 33), "c.png": (16, 16), "d.png": (1, 1)}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": [*parts]}


def assistant(words: str) -> dict:
    return {"role": "assistant", "content": [text(words)]}


# Each: its messages as transformers wants them, with an image's file under "image".
A, B, C, D = ({"type": "image", "image": name} for name in SIZES)
CONVERSATIONS = {
    "one image": [user(A, text("the user asks")), assistant("yes, \n\nno")],
    "several, in several turns": [
        {"role": "system", "content": [text("and again")]},
        user(text("no"), A, text("and"), B),
        assistant("yes"),
        user(C),
        assistant("no and 😀 no"),
    ],
    "none": [user(text("the user")), assistant("says yes")],
    "one pixel, and the same twice": [user(D, A, A, text("asks")), assistant("no")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed, (name, size) in enumerate(SIZES.items()):
        (folder / name).write_bytes(encoded_image(*size, seed=seed))
    return folder


@pytest.fixture(scope="module")
def processors():
    made = {}

    def of(family):
        return made.get(family) or made.setdefault(family, make_processor(family))

    return of


def prepared(folder, tmp_path, processor, *records, **options) -> TokenizedDataset:
    path = write_lines(folder / "data.jsonl", *records)
    return prepare_data(str(path), TextEncoder.of(processor), DataOptions(**options), folder=tmp_path / "kept")


def wanted_of(processor, messages, folder):
    """What the processor makes of a conversation, and where the assistant's words are among its tokens."""

    def opened(part):
        name = part.get("image")
        return part if name is None else part | {"image": image(*SIZES[name], seed=list(SIZES).index(name))}

    whole = [each | {"content": [opened(part) for part in each["content"]]} for each in messages]
    processor.video_processor = SimpleNamespace(num_frames=1, fps=1)  # SmolVLM's reads them
    try:
        found = processor.apply_chat_template(whole, tokenize=True, return_dict=True, return_tensors="np")
    finally:
        processor.video_processor = None
    of_batch = {"input_ids"} | (
        {"pixel_values", "pixel_attention_mask"} if found.get("pixel_attention_mask") is not None else set()
    )
    return {name: values[0] if name in of_batch else values for name, values in found.items()}


# What is learned besides the assistant's words: what follows the header, and what the template writes after them.
LEARNED = {
    "gemma3": ("", "<end_of_turn>\n"),
    "idefics3": (" ", "<end_of_utterance>\n"),
    "smolvlm": (" ", "<end_of_utterance>\n"),
    "llava": ("", " "),
} | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("", "<|im_end|>\n"))


def learned(processor, sample) -> list[str]:
    """The text of each run of learned tokens."""
    marks = np.concatenate([[False], sample["labels"] != -100, [False]])
    edges = np.flatnonzero(np.diff(marks))
    assert all(sample["labels"][marks[1:-1]] == sample["input_ids"][marks[1:-1]])
    return [processor.tokenizer.decode(sample["input_ids"][a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_the_processor(family, folder, tmp_path, processors):
    processor = processors(family)
    data = prepared(folder, tmp_path, processor, *({"messages": each} for each in CONVERSATIONS.values()))
    assert len(data) == len(CONVERSATIONS)
    before, after = LEARNED[family]
    for index, messages in enumerate(CONVERSATIONS.values()):
        sample, wanted = data[index], wanted_of(processor, messages, folder)
        assert sample["input_ids"].tolist() == wanted["input_ids"].tolist()
        words = [each["content"][0]["text"] for each in messages if each["role"] == "assistant"]
        runs = learned(processor, sample)
        if family == "llava":  # whose marks may begin within a token, after its white space
            runs = [each.lstrip() for each in runs]
        assert runs == [f"{before}{each}{after}" for each in words]
        names = {"pixel_values", "image_grid_thw", "pixel_attention_mask"} & wanted.keys()
        has_images = {"mm_token_type_ids"} if "pixel_values" in names else set()
        assert sample.keys() - {"input_ids", "labels"} == names | has_images
        for name in names:
            np.testing.assert_array_equal(sample[name], wanted[name])
            assert sample[name].dtype == wanted[name].dtype
        types = sample.get("mm_token_type_ids", np.zeros_like(sample["input_ids"]))
        for name in {"mm_token_type_ids", "token_type_ids"} & wanted.keys():
            assert types.tolist() == wanted[name][0].tolist()
        assert data.floors[index] == max(np.flatnonzero(types), default=-1) + 1
        assert data.images[index] == values_of(sample)
    assert len(data.shown.arrays["picture_bytes_ends"]) == 4  # each file once


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}<|im_end|>{% endgeneration %}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [None, MARKED])
def test_only_the_completion_is_learned(template, folder, tmp_path):
    processor = make_processor("qwen2_5_vl")
    processor.chat_template = template or processor.chat_template
    prompt = [user(A), assistant("no"), user(text("and"), B, A, text("again"))]
    data = prepared(folder, tmp_path, processor, {"prompt": prompt, "completion": [assistant("yes, no")]})
    assert learned(processor, data[0]) == ["yes, no<|im_end|>" + "\n" * (template is None)]
    assert (
        data[0]["input_ids"].tolist()
        == wanted_of(processor, [*prompt, assistant("yes, no")], folder)["input_ids"].tolist()
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_cuts_are_behind_the_images(family, folder, tmp_path, processors):
    record = {"messages": [user(A, B, text("the user asks")), assistant("yes and no and again yes")]}
    (floor,) = prepared(folder, tmp_path, processors(family), record).floors
    whole = prepared(folder, tmp_path, processors(family), record)[0]
    first = int(np.flatnonzero(whole["labels"] != -100)[0])
    assert 0 < floor < first
    cut = prepared(folder, tmp_path, processors(family), record, max_tokens=first + 1)
    assert (len(cut[0]["input_ids"]), cut.floors, cut.summary.truncated) == (first + 1, [floor], 1)
    np.testing.assert_array_equal(cut[0]["pixel_values"], whole["pixel_values"])
    plain = {"text": "and again"}
    for most, dropped in ((floor - 1, 1), (2, 1), (floor, 0)):
        data = prepared(folder, tmp_path, processors(family), record, plain, max_tokens=most)
        assert (len(data), data.summary.dropped_too_long, data.summary.dropped_no_target) == (1, dropped, 1 - dropped)
    with pytest.raises(DataError, match=f"line 1: {len(whole['labels'])} tokens, more than the cap of {floor}"):
        prepared(folder, tmp_path, processors(family), record, max_tokens=floor, too_long="error")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_text_that_spells_a_image_is_refused(family, folder, tmp_path, processors):
    processor = processors(family)
    spelled = [
        {"messages": [user(A, text("ok")), assistant(f"a {processor.image_token}")]},
        {"text": processor.image_token},
    ]
    if family == "gemma3":
        spelled.append({"prompt": "a", "completion": "<image_soft_token>"})
    if family == "qwen2_5_vl":
        spelled.append({"messages": [user(text("<|video_pad|>")), assistant("b")]})
    for record in spelled:
        with pytest.raises(DataError, match=r"line 2: its text has <.*>, which stands for an image or a video"):
            prepared(folder, tmp_path, processor, {"text": "fine"}, record)


def test_template_that_drops_images_is_refused(folder, tmp_path):
    processor = make_processor("qwen2_vl")
    processor.chat_template = CHATML
    with pytest.raises(DataError, match=r"line 1: the chat template writes 0 <\|image_pad\|> for 1 images"):
        prepared(folder, tmp_path, processor, {"messages": CONVERSATIONS["one image"]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.png", r"image 2 \(missing.png\): it cannot be read: No such file"),
        ("data.jsonl", r"image 2 \(data.jsonl\): it is none of BMP"),
        ("https://a.host/b.png", r"image 2 \(https://a.host/b.png\): it is on the network: give --fetch-images"),
        (base64.b64encode(b"no image").decode(), "image 2: it is none of BMP"),
        (
            base64.b64encode(encoded_image(900, 4)).decode(),
            "image 2: the model's processor refuses it: .* aspect ratio",
        ),
    ],
)
def test_bad_images_are_named(folder, tmp_path, processors, source, message):
    kind = "base64" if "." not in source else "path"
    record = {"messages": [user(A, {"type": "image", kind: source}), assistant("yes")]}
    with pytest.raises(DataError, match=rf"data.jsonl, line 2, {message}"):
        prepared(folder, tmp_path, processors("qwen2_vl"), {"messages": CONVERSATIONS["one image"]}, record)


def test_images_are_in_the_prepared_file(tmp_path, processors):
    """Samples are found again, sent to workers, split and mixed without the images' own files."""
    (tmp_path / "a.png").write_bytes(encoded_image())
    processor = processors("qwen2_5_vl")
    records = [{"messages": [user(A), assistant("yes")]}, {"text": "no"}, {"messages": [user(A, A), assistant("no")]}]
    data = prepared(tmp_path, tmp_path, processor, *records)
    (tmp_path / "a.png").unlink()
    again = prepare_data(str(tmp_path / "data.jsonl"), TextEncoder.of(processor), folder=tmp_path / "kept")
    data.save(tmp_path / "saved.npz")
    read = TokenizedDataset.load(tmp_path / "saved.npz", processor=processor)
    read.path = None  # so that it is sent whole
    for each in (again, pickle.loads(pickle.dumps(data)), read, pickle.loads(pickle.dumps(read))):
        assert each.images == data.images == [[4 * 4 * 96], [], [4 * 4 * 96] * 2]
        for index in range(3):
            assert each[index].keys() == data[index].keys()
            for name, values in each[index].items():
                np.testing.assert_array_equal(values, data[index][name])
    first, second = split_samples(data, 1)
    assert [*first.images, *second.images] == [data.images[at] for at in (*first.indices, *second.indices)]
    assert first.floors == [data.floors[at] for at in first.indices]
    texts = tokenize_file(write_lines(tmp_path / "texts.jsonl", {"text": "a"}), TextEncoder.of(processor.tokenizer))
    mixed = mixture([texts, data], [2, 1])
    assert mixed.images == [[], [], *data.images]
    assert mixed.floors == [0, 0, *data.floors]
    assert mixed[2].keys() == data[0].keys()
    assert mixture([texts]).images is mixture([texts]).floors is None
    alone = TokenizedDataset.load(data.path)
    assert alone.text(0)["input_ids"].tolist() == data[0]["input_ids"].tolist()
    with pytest.raises(ValueError, match=r"sample 0 has images: give TokenizedDataset.load the model's processor"):
        alone[0]


def test_undecoded_samples_share_as_decoded_ones_and_need_no_processor(tmp_path, processors):
    """Equal tokens with another image of the same size are not shared; also in parts and mixtures."""
    asked = text("and the user asks again " * 8)
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded_image(seed=ord(name[0])))
    records = [{"messages": [user(each, asked), assistant(answer)]} for each in (A, B) for answer in ("yes", "no")]
    encoder = TextEncoder.of(processors("qwen2_5_vl"))
    made = tokenize_file(write_lines(tmp_path / "data.jsonl", records), encoder, DataOptions(max_tokens=512))
    made.save(tmp_path / "data.npz")
    decoded = TokenizedDataset.load(tmp_path / "data.npz", processor=processors("qwen2_5_vl"))
    unread = TokenizedDataset.load(tmp_path / "data.npz")
    halves = [SampleSubset([unread], np.asarray(part)) for part in ([0, 2], [1, 3])]
    want = find_relatives(decoded)
    assert [each.parent for each in want.strips(range(4))].count(None) == 2
    for each, order in ((unread, [0, 1, 2, 3]), (mixture(halves), [0, 2, 1, 3])):
        found = find_relatives(each.undecoded())
        assert found.floors == [want.floors[at] for at in order]
        pairs = {(order[strip.sample], strip.start) for strip in found.strips(range(4)) if strip.parent is not None}
        assert {start for _, start in pairs} == {strip.start for strip in want.strips(range(4))} - {0}
        families = [{order[strip.sample] // 2 for strip in family} for family in found.families()]
        assert all(len(images) == 1 for images in families)


def test_fingerprints_of_processors(monkeypatch):
    import PIL

    def fingerprint(**changed):
        processor = make_processor("qwen2_vl")
        for name, value in changed.items():
            setattr(processor.image_processor, name, value)
        return TextEncoder.of(processor).fingerprint

    found = [fingerprint(), fingerprint(), fingerprint(do_normalize=False)]
    monkeypatch.setattr(PIL, "__version__", "0")
    found.append(fingerprint())
    found.append(TextEncoder.of(make_processor("qwen2_vl").tokenizer).fingerprint)
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_memory_does_not_grow_with_the_images(tmp_path, processors, monkeypatch):
    monkeypatch.setattr(encode, "_BATCH_RECORDS", 5)
    coded = (base64.b64encode(encoded_image(seed=seed) + bytes(100_000)).decode() for seed in range(80))
    records = [{"messages": [user({"type": "image", "base64": each}), assistant("yes")]} for each in coded]
    path = write_lines(tmp_path / "data.jsonl", *records)
    encoder = TextEncoder.of(processors("qwen2_vl"))
    tracemalloc.start()
    try:
        data = prepare_data(str(path), encoder, folder=tmp_path / "kept")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4e6 < 8e6 < len(data.shown.arrays["picture_bytes"])
