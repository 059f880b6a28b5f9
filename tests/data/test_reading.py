"""Images read from files and servers, and decoded by Pillow; and those that are refused."""

from __future__ import annotations

import io
import os
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from odc_triton.jobs.data import image_files
from odc_triton.jobs.data.image_files import ImageError, decode_image, fetch_image, read_image
from tests.support.processors import encoded_image, image

PNG = encoded_image()


def bomb(side: int) -> bytes:
    """The head of a black PNG of side x side pixels, in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def saved(image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


REFUSED = {
    "empty": (b"", "it is empty"),
    "text": (b"an image", "it is none of BMP, GIF, JPEG"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "it is none of BMP"),
    "EPS, which Pillow gives to another program": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "it is none of",
    ),
    "cut": (PNG[: len(PNG) // 2], "it is damaged: .*truncated"),
    "cut JPEG": (encoded_image(kind="JPEG")[:-99], "it is damaged: .*truncated"),
    "100 million pixels": (bomb(10_000), r"100000000 pixels.* exceeds limit .*: make it smaller"),
    "400 million pixels": (bomb(20_000), r"400000000 pixels.* exceeds limit .*: make it smaller"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_images_that_are_refused(name):
    content, message = REFUSED[name]
    with pytest.raises(ImageError, match=message):
        decode_image(content)


def test_images_become_upright_and_rgb():
    from PIL import Image

    wanted = np.asarray(image())
    assert np.asarray(decode_image(PNG)).tolist() == wanted.tolist()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = decode_image(saved(image(), exif=exif))
    assert np.asarray(turned).tolist() == np.rot90(wanted, -1).tolist()
    for mode in ("CMYK", "L", "P", "RGBA", "1", "LA"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        given = image().convert(mode)
        assert np.asarray(decode_image(saved(given, kind))).tolist() == np.asarray(given.convert("RGB")).tolist()
    assert decode_image(encoded_image(1, 1)).size == (1, 1)
    frames = [image(seed=seed).convert("P") for seed in range(2)]
    first = decode_image(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.asarray(first).tolist() == np.asarray(frames[0].convert("RGB")).tolist()


def test_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "a.png").write_bytes(PNG)
    os.mkfifo(tmp_path / "pipe")
    for path in ("../a.png", str(tmp_path / "a.png")):
        assert read_image(path, str(tmp_path / "data"), fetch=False) == PNG
    for path, message in (
        ("b.png", "it cannot be read: No such file"),
        ("data", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
        ("a" * 5000, "it cannot be read: File name too long"),
        ("ftp://host/a.png", "only http and https"),
    ):
        with pytest.raises(ImageError, match=message):
            read_image(path, str(tmp_path), fetch=False)
    with pytest.raises(ImageError, match="its path is relative, and a data set on the hub has no folder"):
        read_image("a.png", None, fetch=False)


def test_largest_file(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "LARGEST_IMAGE_BYTES", len(PNG))
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG + b"\0")
    assert read_image("a.png", str(tmp_path), fetch=False) == read_image(PNG, None, fetch=False) == PNG
    for source in ("b.png", PNG + b"\0"):
        with pytest.raises(ImageError, match=r"it has more than .* MiB: make it smaller"):
            read_image(source, str(tmp_path), fetch=False)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        self.send_response({"missing": 404, "file": 302, "ftp": 302, "there": 301}.get(name, 200))
        to = {"file": "file:///etc/hostname", "ftp": "ftp://127.0.0.1/", "there": "/image"}.get(name)
        if to is not None:
            self.send_header("Location", to)
        if name == "short":
            self.send_header("Content-Length", str(len(PNG) + 9))
        while name == "greets" and not self.server.ended.wait(0.05):
            try:
                self.wfile.write(b"X-Wait: 1\r\n")
            except OSError:
                return
        self.end_headers()
        for _ in range(100_000 if name in ("endless", "slow") else 1):
            try:
                self.wfile.write(PNG[:1] if name == "slow" else PNG)
            except OSError:  # the other side has closed it
                return
            if name == "slow" and self.server.ended.wait(0.05):
                return

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads, server.ended = True, threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_images_of_a_server(server):
    assert fetch_image(f"{server}/image") == fetch_image(f"{server}/there") == PNG
    assert read_image(f"{server}/image", None, fetch=True) == PNG
    with pytest.raises(ImageError, match="it is on the network: give --fetch-images"):
        read_image(f"{server}/image", None, fetch=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "it cannot be fetched: .*404"),
        ("file", "it cannot be fetched: .*protocol"),
        ("ftp", "it cannot be fetched: .*protocol"),
        ("short", "it cannot be fetched: peer closed connection"),
        ("endless", "it has more than 0.125 MiB: make it smaller"),
        ("slow", r"its server did not send it within 0.2 s"),
        ("greets", r"its server did not send it within 0.2 s"),
    ],
)
def test_wrong_answers(server, monkeypatch, name, message):
    monkeypatch.setattr(image_files, "LARGEST_IMAGE_BYTES", 2**17)
    if name in ("slow", "greets"):
        monkeypatch.setattr(image_files, "FETCH_S", 0.2)
    with pytest.raises(ImageError, match=message):
        fetch_image(f"{server}/{name}")
