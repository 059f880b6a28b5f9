"""Pictures read from files and servers, and decoded by Pillow; and those that are refused."""

from __future__ import annotations

import io
import os
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from odc_triton.jobs.data import pictures
from odc_triton.jobs.data.pictures import PictureError, decode_picture, fetch_picture, read_picture
from tests.support.processors import encoded_picture, picture

PNG = encoded_picture()


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
    "text": (b"a picture", "it is none of BMP, GIF, JPEG"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "it is none of BMP"),
    "EPS, which Pillow gives to another program": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "it is none of",
    ),
    "cut": (PNG[: len(PNG) // 2], "it is damaged: .*truncated"),
    "cut JPEG": (encoded_picture(kind="JPEG")[:-99], "it is damaged: .*truncated"),
    "100 million pixels": (bomb(10_000), r"100000000 pixels.* exceeds limit .*: make it smaller"),
    "400 million pixels": (bomb(20_000), r"400000000 pixels.* exceeds limit .*: make it smaller"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pictures_that_are_refused(name):
    content, message = REFUSED[name]
    with pytest.raises(PictureError, match=message):
        decode_picture(content)


def test_pictures_become_upright_and_rgb():
    from PIL import Image

    wanted = np.asarray(picture())
    assert np.asarray(decode_picture(PNG)).tolist() == wanted.tolist()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = decode_picture(saved(picture(), exif=exif))
    assert np.asarray(turned).tolist() == np.rot90(wanted, -1).tolist()
    for mode in ("CMYK", "L", "P", "RGBA", "1", "LA"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        image = picture().convert(mode)
        assert np.asarray(decode_picture(saved(image, kind))).tolist() == np.asarray(image.convert("RGB")).tolist()
    assert decode_picture(encoded_picture(1, 1)).size == (1, 1)
    frames = [picture(seed=seed).convert("P") for seed in range(2)]
    first = decode_picture(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.asarray(first).tolist() == np.asarray(frames[0].convert("RGB")).tolist()


def test_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "a.png").write_bytes(PNG)
    os.mkfifo(tmp_path / "pipe")
    for path in ("../a.png", str(tmp_path / "a.png")):
        assert read_picture(path, str(tmp_path / "data"), fetch=False) == PNG
    for path, message in (
        ("b.png", "it cannot be read: No such file"),
        ("data", "it is not a regular file"),
        ("pipe", "it is not a regular file"),
        ("a" * 5000, "it cannot be read: File name too long"),
    ):
        with pytest.raises(PictureError, match=message):
            read_picture(path, str(tmp_path), fetch=False)
    with pytest.raises(PictureError, match="its path is relative, and a data set on the hub has no folder"):
        read_picture("a.png", None, fetch=False)


def test_largest_file(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "LARGEST_PICTURE_BYTES", len(PNG))
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG + b"\0")
    assert read_picture("a.png", str(tmp_path), fetch=False) == read_picture(PNG, None, fetch=False) == PNG
    for source in ("b.png", PNG + b"\0"):
        with pytest.raises(PictureError, match=r"it has more than .* MiB: make it smaller"):
            read_picture(source, str(tmp_path), fetch=False)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        self.send_response({"missing": 404, "file": 302, "ftp": 302, "there": 301}.get(name, 200))
        to = {"file": "file:///etc/hostname", "ftp": "ftp://127.0.0.1/", "there": "/picture"}.get(name)
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


def test_pictures_of_a_server(server):
    assert fetch_picture(f"{server}/picture") == fetch_picture(f"{server}/there") == PNG
    assert read_picture(f"{server}/picture", None, fetch=True) == PNG
    with pytest.raises(PictureError, match="it is on the network: give --fetch-images"):
        read_picture(f"{server}/picture", None, fetch=False)


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
    monkeypatch.setattr(pictures, "LARGEST_PICTURE_BYTES", 2**17)
    if name in ("slow", "greets"):
        monkeypatch.setattr(pictures, "FETCH_S", 0.2)
    with pytest.raises(PictureError, match=message):
        fetch_picture(f"{server}/{name}")
