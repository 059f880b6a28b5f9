"""JSON over HTTP to one server, each request with a deadline. Contacts that address only: no proxy, no redirect."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from ...base.errors import GenerationAborted, GenerationFailed

_SHOWN = 300  # characters of an answer that a message shows


class Refused(GenerationFailed):
    """The server answered with another status than 200."""


class Server:
    """The server at `address`, such as http://127.0.0.1:8000. May be used by several threads at once.

    Requests raise GenerationFailed with the address, the request, and the failure; GenerationAborted after `abort`.
    """

    def __init__(self, address: str) -> None:
        try:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise ValueError(address)
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:  # also urlsplit's, of an IPv6 address or a port
            raise ValueError(f"the server's address is {address!r}: write it as http://127.0.0.1:8000") from None
        self.address = address.rstrip("/")
        self.host = parts.hostname
        self._path = parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._aborts = 0  # how often `abort` was called

    def get(self, path: str, *, timeout_s: float) -> Any:
        """The server's answer to GET `path`."""
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, content: Any = None, *, timeout_s: float, is_json: bool = True) -> Any:
        """The server's answer to `content`; None if it is empty, or not to be JSON."""
        return self._ask("POST", path, json.dumps({} if content is None else content), timeout_s, is_json)

    def abort(self) -> None:
        """Aborts the requests of other threads."""
        with self._lock:
            self._aborts += 1
            for each in self._open:
                _end(each, threading.Event())

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float, is_json: bool = True) -> Any:
        what = f"{method} {path}"
        aborts = self._aborts
        try:
            status, content = self._exchange(method, path, body, timeout_s, aborts)
        except TimeoutError:
            raise GenerationFailed(
                f"the server at {self.address} did not answer {what} within {timeout_s:g} s: see its log, or give more "
                f"time (--timeout-minutes, or a trainer's ddp_timeout)"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if self._aborts != aborts:
                raise GenerationAborted(f"{what} to the server at {self.address} was aborted") from None
            raise GenerationFailed(
                f"the server at {self.address} is unreachable for {what} ({type(error).__name__}: {error}): see its "
                f"log, start it again, and resume from the last checkpoint"
            ) from None
        if status != 200:
            raise Refused(
                f"the server at {self.address} refused {what} with status {status}: {_said(content)}: see its log"
            )
        if not content or not is_json:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise GenerationFailed(
                f"the server at {self.address} did not answer {what} with JSON: {_text(content)}: is it vLLM?"
            ) from None

    def _exchange(self, method: str, path: str, body: str | None, timeout_s: float, aborts: int) -> tuple[int, bytes]:
        with contextlib.closing(self._kind(self.host, self.port, timeout=timeout_s)) as connection:
            connection.connect()
            raw = connection.sock
            with self._lock:
                if self._aborts != aborts:  # while it connected
                    raise ConnectionAbortedError
                self._open.add(raw)
            late = threading.Event()
            timer = threading.Timer(timeout_s, _end, (raw, late))  # a socket's timeout begins again with each byte
            timer.start()
            try:
                connection.request(method, self._path + path, body, {"Content-Type": "application/json"})
                with connection.getresponse() as response:
                    answer = response.status, response.read()
            finally:
                timer.cancel()
                with self._lock:
                    self._open.discard(raw)
                # Also without an error: an answer of unknown length is over when its connection is.
                if late.is_set():
                    raise TimeoutError
                if self._aborts != aborts:
                    raise ConnectionAbortedError
            return answer


def _end(connection: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _said(refusal: bytes) -> str:
    """vLLM's message, if there is one."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        refusal = json.loads(refusal)["error"]["message"].encode()
    return _text(refusal)


def _text(content: bytes) -> str:
    return repr(content[:_SHOWN].decode(errors="replace"))
