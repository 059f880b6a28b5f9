"""Hosts on one machine: network namespaces with TCP between them, each on a cable that can be cut.

As different hosts, they share neither addresses nor abstract Unix sockets. `inside` starts a program that may make
them; on kernels that forbid it `why_not` says so.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

NO_NAMESPACES = "ODC_NO_NAMESPACES"
INTERFACE = "odc"  # of each host
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_NET = "10.77.0"
_TIMEOUT_S = 60


def inside(*command: str) -> list[str]:
    """`command` in a network of its own, as the owner of what it makes there."""
    return ["unshare", "-rn", *command]


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    make = inside("ip", "link", "add", "odc0", "type", "veth", "peer", "name", "odc1")
    try:
        done = subprocess.run(make, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


def _libc(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


class Hosts:
    """`count` hosts and a bridge between them in this process's network, which `inside` made. They end with it.

    Other processes may use a copy: namespaces are named by this process's open files.
    """

    def __init__(self, count: int) -> None:
        self._bridge = f"/proc/{os.getpid()}/ns/net"
        self._files = [self._new() for _ in range(count)]
        self._paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]
        self.addresses = [f"{_NET}.{host + 1}" for host in range(count)]
        self._ip(self._bridge, "link", "add", "odc-bridge", "type", "bridge")
        self._ip(self._bridge, "link", "set", "odc-bridge", "up")
        for host, (path, address) in enumerate(zip(self._paths, self.addresses, strict=True)):
            cable = f"odc{host}"
            peer = ("peer", "name", INTERFACE, "netns", path)
            self._ip(self._bridge, "link", "add", cable, "type", "veth", *peer)
            self._ip(self._bridge, "link", "set", cable, "master", "odc-bridge", "up")
            self._ip(path, "link", "set", "lo", "up")
            self._ip(path, "addr", "add", f"{address}/24", "dev", INTERFACE)
            self._ip(path, "link", "set", INTERFACE, "up")

    @staticmethod
    def _in_thread(function: Callable[[], Any]) -> Any:
        """A thread has a network namespace of its own if it asks for one; what it opens stays in there."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(function()))
        thread.start()
        thread.join()
        return found[0]

    def _new(self) -> int:
        def unshare() -> int:
            _libc("unshare", _NEW_NETWORK)
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

        return self._in_thread(unshare)

    @staticmethod
    def _ip(namespace: str, *words: str) -> None:
        subprocess.run(["nsenter", f"--net={namespace}", "ip", *words], check=True, timeout=_TIMEOUT_S)

    def on(self, host: int, *command: str) -> list[str]:
        """`command` on that host."""
        return ["nsenter", f"--net={self._paths[host]}", *command]

    def enter(self, host: int) -> None:
        """Moves this thread there, and what it starts."""
        file = os.open(self._paths[host], os.O_RDONLY)
        try:
            _libc("setns", file, _NEW_NETWORK)
        finally:
            os.close(file)

    def call(self, host: int, function: Callable[[], Any]) -> Any:
        """What `function` returns there. Sockets that it opens stay there."""

        def there() -> Any:
            self.enter(host)
            return function()

        return self._in_thread(there)

    def cut(self, host: int) -> None:
        self._ip(self._bridge, "link", "set", f"odc{host}", "down")

    def close(self) -> None:
        for host, file in enumerate(self._files):
            self._ip(self._bridge, "link", "del", f"odc{host}")  # else the kernel does, at some later time
            os.close(file)
        self._ip(self._bridge, "link", "del", "odc-bridge")
