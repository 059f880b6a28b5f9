"""Images from where they are, as encoded bytes, and decoded by Pillow. Both refuse what is too large.

Pillow's own limit of pixels is an error here. Of an animation the first frame is taken, and an image is turned upright
by its EXIF orientation, as transformers' `load_image` does.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from .json_files import opened

LARGEST_IMAGE_BYTES = 20 * 2**20
FETCH_S = 20.0  # for one image, redirects included
# Others are documents, which Pillow gives to other programs, or so rare that their readers are little tested.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class ImageError(ValueError):
    """An image that cannot be used, and why."""


def read_image(source: str | bytes, folder: str | None, *, fetch: bool) -> bytes:
    """The encoded image of a path (relative to `folder`), or of an http(s) URL if `fetch`. Raises ImageError."""
    if isinstance(source, bytes):
        content = source
    elif source.startswith(("http://", "https://")):
        if not fetch:
            raise ImageError("it is on the network: give --fetch-images to fetch it, or its file's path")
        content = fetch_image(source)
    elif "://" in source:
        raise ImageError("only http and https addresses are fetched: give its file's path")
    else:
        if folder is None and not os.path.isabs(source):
            raise ImageError("its path is relative, and a data set on the hub has no folder: give its bytes")
        try:
            with opened(os.path.join(folder or "", source)) as file:
                content = file.read(LARGEST_IMAGE_BYTES + 1)
        except OSError as error:
            raise ImageError(f"it cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # of no regular file
            raise ImageError("it is not a regular file") from error
    if len(content) > LARGEST_IMAGE_BYTES:
        raise _too_large()
    return content


def decode_image(content: bytes) -> Any:
    """The upright Pillow image, RGB. Raises ImageError."""
    from PIL import Image, ImageOps

    if not content:
        raise ImageError("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF, of palettes
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ImageError(f"{error}: make it smaller") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"it is none of {', '.join(_FORMATS)}") from error
    except Exception as error:  # readers of formats raise many kinds
        raise ImageError(f"it is damaged: {error}") from error


def fetch_image(url: str) -> bytes:
    """The content at an http(s) URL. Raises ImageError, also after `FETCH_S` seconds and `LARGEST_IMAGE_BYTES`."""
    fetched: Future[bytes] = Future()

    def fetch() -> None:
        try:
            fetched.set_result(_content(url))
        except BaseException as error:
            fetched.set_exception(error)

    # A server that sends a byte now and then stays within any timeout of a socket.
    threading.Thread(target=fetch, name="odc-image", daemon=True).start()
    try:
        return fetched.result(FETCH_S)
    except FutureTimeoutError:
        raise ImageError(f"its server did not send it within {FETCH_S:g} s") from None


def _content(url: str) -> bytes:
    import httpx

    content = bytearray()
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=2 * FETCH_S) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                content += part
                if len(content) > LARGEST_IMAGE_BYTES:
                    raise _too_large()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ImageError(f"it cannot be fetched: {str(error).splitlines()[0]}") from error
    return bytes(content)


def _too_large() -> ImageError:
    return ImageError(f"it has more than {LARGEST_IMAGE_BYTES / 2**20:.3g} MiB: make it smaller")
