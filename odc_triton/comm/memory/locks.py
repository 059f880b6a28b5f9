"""Locks between processes that the kernel releases when their holder dies: fcntl byte ranges of one memfd.

[Note: traps of fcntl locks] They belong to a process, not to a thread or a descriptor: threads of one process
need a lock of their own on top, and closing *any* descriptor of the file drops all locks this process holds on
it, so the file is opened once and never duplicated. F_SETLKW has no timeout, hence LOCK_NB and a deadline in the
caller. Locks of open file descriptions (F_OFD_*) would survive in forked children, so they are not used.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = "hhxxxxqqixxxx"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class ByteLocks:
    """Exclusive locks on single bytes of `fd`, by index."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def try_lock(self, index: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index, os.SEEK_SET)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def unlock(self, index: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, index, os.SEEK_SET)

    def holder_pid(self, index: int) -> int | None:
        """The *other* process that holds the byte; None if it is free or held by this process."""
        probe = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, probe))
        return None if kind == fcntl.F_UNLCK else pid

    def close(self) -> None:
        os.close(self._fd)
