"""A server that speaks the hub's HTTP as far as a push needs it, and fails where a test wants it to."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_STEPS = ("whoami", "repos/create", "validate-yaml", "preupload", "objects/batch", "lfs/", "commit")


class Hub:
    """`faults`: by step, what its next requests get instead of an answer: a status, "cut" in the middle, or "hang"."""

    def __init__(self) -> None:
        self.url, self.asked, self.files = "", list[str](), dict[str, bytes]()  # files of the newest commit
        self.created: dict[str, Any] = {}
        self.faults: dict[str, list[Any]] = {}
        self.user: dict[str, Any] = {"name": "me", "orgs": [{"name": "us"}], "auth": {"accessToken": {"role": "write"}}}
        self.released = threading.Event()
        self._blobs: dict[str, bytes] = {}

    def answer(self, step: str, path: str, body: bytes) -> Any:
        if step == "whoami":
            return self.user
        if step == "lfs/":
            self._blobs[path.rpartition("/")[2]] = body
            return {}
        lines = [json.loads(line) for line in body.splitlines()]
        if step == "commit":
            for line in lines[1:]:
                file, is_large = line["value"], line["key"] == "lfsFile"
                self.files[file["path"]] = self._blobs[file["oid"]] if is_large else base64.b64decode(file["content"])
            return {"commitUrl": f"{self.url}/me/run/commit/0", "commitOid": "0"}
        (given,) = lines
        if step == "preupload":
            kinds = {each["path"]: "lfs" if "safetensors" in each["path"] else "regular" for each in given["files"]}
            return {"files": [{"path": p, "uploadMode": kind, "shouldIgnore": False} for p, kind in kinds.items()]}
        if step == "objects/batch":
            sends = [{"upload": {"href": f"{self.url}/lfs/{each['oid']}"}} for each in given["objects"]]
            return {"objects": [each | {"actions": send} for each, send in zip(given["objects"], sends, strict=True)]}
        if step == "repos/create":
            self.created = given
        return {"url": f"{self.url}/{given.get('organization') or 'me'}/{given.get('name')}"}


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            step = next((each for each in _STEPS if each in self.path), "")
            hub.asked.append(step)
            fault = hub.faults[step].pop(0) if hub.faults.get(step) else None if step else 404
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length // 2 if fault == "cut" else length)
            if fault == "hang":
                hub.released.wait()
            self.close_connection = True
            if isinstance(fault, str):
                return
            made = json.dumps({} if fault else hub.answer(step, self.path, body)).encode()
            self.send_response(fault or 200)
            self.send_header("Content-Length", str(len(made)))
            self.end_headers()
            self.wfile.write(made)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
