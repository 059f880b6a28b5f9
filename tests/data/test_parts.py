"""Records with images: each form's messages and images, and what is refused."""

from __future__ import annotations

import base64

import pytest

from odc_triton.jobs.data.encode import batches
from odc_triton.jobs.data.forms import record_of
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import open_source
from tests.support.processors import encoded_image, image

PNG = encoded_image()
CODED = base64.b64encode(PNG).decode()
IMAGE = {"type": "image"}
ASKS = {"type": "text", "text": "What?"}
YES = {"role": "assistant", "content": "yes"}


def asked(*parts: object) -> list[dict]:
    return [{"role": "user", "content": parts[0] if isinstance(parts[0], str) else [*parts]}, YES]


def record(fields: object):
    return record_of("FILE, line 3", fields)


ONE = asked(IMAGE, ASKS)
FORMS = {
    "path": ({"messages": asked(IMAGE | {"path": "a.png"}, ASKS)}, ONE, ["a.png"]),
    "url": ({"messages": asked(IMAGE | {"url": "https://host/a.png"}, ASKS)}, ONE, ["https://host/a.png"]),
    "base64": ({"messages": asked(IMAGE | {"base64": CODED}, ASKS)}, ONE, [PNG]),
    "data URL": ({"messages": asked(IMAGE | {"url": f"data:image/png;base64,{CODED}"}, ASKS)}, ONE, [PNG]),
    "OpenAI": ({"messages": asked({"type": "image_url", "image_url": {"url": "http://a"}}, ASKS)}, ONE, ["http://a"]),
    "struct of datasets": ({"messages": asked(IMAGE | {"image": {"bytes": PNG, "path": "a"}}, ASKS)}, ONE, [PNG]),
    "field": ({"messages": ONE, "images": ["a"]}, ONE, ["a"]),
    "both ways": (
        {"messages": asked(IMAGE, IMAGE | {"path": "b"}, IMAGE), "images": ["a", "c"]},
        asked(IMAGE, IMAGE, IMAGE),
        ["a", "b", "c"],
    ),
    "TRL": (
        {"messages": [{"role": "system", "content": "s"}, *asked("What?")], "images": ["a", "b"]},
        [{"role": "system", "content": "s"}, *asked(IMAGE, IMAGE, ASKS)],
        ["a", "b"],
    ),
    "TRL's prompt": ({"prompt": asked("What?")[:1], "completion": [YES], "images": ["a"]}, ONE, ["a"]),
    "LLaVA": (
        {
            "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "yes"}],
            "image": "coco/a.jpg",
        },
        ONE,
        ["coco/a.jpg"],
    ),
    "LLaVA, in the middle": (
        {"messages": [*asked("See <image> and <image>"), *asked("Why?")], "images": ["a", "b"]},
        [*asked({"type": "text", "text": "See "}, IMAGE, {"type": "text", "text": " and "}, IMAGE), *asked("Why?")],
        ["a", "b"],
    ),
    "no image": ({"messages": asked(ASKS), "images": [], "image": ""}, asked(ASKS), []),
    "the mark alone": ({"messages": asked("an <image> tag")}, asked("an <image> tag"), []),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    fields, messages, images = FORMS[form]
    found = record(fields)
    assert found.messages == messages
    assert list(found.images) == images


WRONG = {
    "part without a type": (asked({"text": "a"}), {}, "message 0, part 0 is no object with a \"type\".* it has 'text'"),
    "text without text": (asked({"type": "text"}), {}, "part 0 is a text without 'text'; it has 'type'"),
    "video": (asked({"type": "video", "video": "a.mp4"}), {}, "has the type 'video'; only texts and images"),
    "videos": (asked("What?"), {"videos": ["a.mp4"]}, "has 'videos'; only texts and images"),
    "two in a part": (asked(IMAGE | {"path": "a", "url": "b"}), {}, "give one image a part"),
    "a number": (asked(IMAGE | {"image": 7}), {}, "part 0: an image is a path, .* not a number"),
    "cut base64": (asked(IMAGE | {"base64": CODED[:-3]}), {}, "part 0: its base64 is damaged: .*"),
    "data URL of text": (asked(IMAGE | {"url": "data:image/svg+xml,<svg/>"}), {}, "a data URL must be base64"),
    "empty path": (asked(IMAGE | {"path": ""}), {}, "'' is the path of no image"),
    "half a surrogate pair": (asked(IMAGE), {"image": "a\ud800"}, r"'a\\ud800' is the path of no image"),
    "assistant": (
        [asked(ASKS)[0], {"role": "assistant", "content": [IMAGE]}],
        {"image": "a"},
        "message 1 of the assistant has an image",
    ),
    "more places": (asked(IMAGE, IMAGE), {"images": ["a"]}, "1 images in 'images' and its messages have 2 places"),
    "fewer places": (asked(IMAGE), {"images": ["a", "b"]}, "2 images in 'images' and its messages have 1 places"),
    "both fields": (asked(IMAGE), {"images": ["a"], "image": "b"}, "has 'images' and also 'image'; keep one"),
    "opened by Pillow": (asked(IMAGE), {"image": image()}, "image 1 of 'image': an image is a path, .* not Image"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_records_are_named(wrong):
    messages, fields, message = WRONG[wrong]
    with pytest.raises(DataError, match=f"^FILE, line 3: .*{message}"):
        record({"messages": messages, **fields})


@pytest.mark.parametrize("fields", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
def test_only_messages_have_images(fields):
    with pytest.raises(DataError, match="FILE, line 3: has 'images', and only 'messages' can have images"):
        record(fields | {"images": ["a.png"]})


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_image_columns_stay_encoded(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    part = {"type": datasets.Value("string"), "text": datasets.Value("string")}
    features = datasets.Features(
        {"messages": [{"role": datasets.Value("string"), "content": [part]}], "images": datasets.List(datasets.Image())}
    )
    messages = [{"role": "user", "content": [IMAGE, ASKS]}, {"role": "assistant", "content": [ASKS]}]
    made = datasets.Dataset.from_dict({"messages": [messages], "images": [[{"bytes": PNG}]]}, features)
    assert made[0]["images"][0].size == (20, 12)
    place = tmp_path / "data.parquet"
    made.to_parquet(place) if kind == "parquet" else made.save_to_disk(tmp_path / "saved")
    (found,) = open_source(str(place if kind == "parquet" else tmp_path / "saved"))
    assert found.images == (PNG,)
    assert found.messages[0]["content"] == [IMAGE, ASKS]
    assert found.folder == str(tmp_path if kind == "parquet" else tmp_path / "saved")


def test_batches_hold_few_images():
    one = record(FORMS["TRL"][0])
    assert [len(each) for each in batches([one] * 120)] == [50, 50, 20]
