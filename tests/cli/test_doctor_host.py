"""The doctor's findings on hosts: sockets' folder, shared memory, memory, CPUs and limits."""

from __future__ import annotations

import os

import pytest

from odc_triton.cli.doctor import examine
from odc_triton.cli.doctor.findings import NOTE, PROBLEM, render
from tests.support.machines import GIB, H100, Machine, bad, only


def test_the_longest_folder_for_sockets() -> None:
    """A socket's path has 107 bytes: torch names it /symm_mem- and the process number, of at most 7 digits."""
    fits = "/" + "t" * (107 - len("/symm_mem-4194303") - 1)
    assert bad(examine(Machine(environment={"TMPDIR": fits}), H100)) == []
    assert "1 bytes too long" in only(examine(Machine(environment={"TMPDIR": fits + "t"}), H100), PROBLEM, "TMPDIR")
    short_pids = Machine(environment={"TMPDIR": fits + "tt"}, files={"/proc/sys/kernel/pid_max": "32768\n"})
    assert bad(examine(short_pids, H100)) == []


def test_the_folder_for_sockets() -> None:
    machine = Machine(environment={"TEMP": "/b", "TMP": "/a"}, socket_errors={"/a/": "Read-only file system"})
    assert "no socket can be made in TMP=/a" in only(examine(machine, H100), PROBLEM, "TMPDIR")
    assert f"/a/odc-doctor-{os.getpid()}" in machine.tried
    mounts = "rootfs / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/me/fast tmpfs rw 0 0\n"
    for folder, is_fine in (("/tmp", True), ("/home/me", False), ("/home/me/fast", True), ("/homely", True)):
        report = examine(Machine(environment={"TMPDIR": folder}, files={"/proc/mounts": mounts}), H100)
        assert (bad(report) == []) is is_fine, folder


def test_sockets_that_killed_ranks_left() -> None:
    machine = Machine(
        folders={"/tmp": ["symm_mem-12", "symm_mem-34", "symm_mem-", "other"]}, files={"/proc/34/stat": "34 (python)"}
    )
    words = only(examine(machine, H100), NOTE, "TMPDIR")
    assert words.startswith("1 socket of killed ranks")
    assert words.endswith("rm /tmp/symm_mem-12")


@pytest.mark.parametrize(
    ("machine", "level", "topic", "words"),
    [
        (Machine(ranks_error="memfd: not permitted"), PROBLEM, "ranks", "can't share a model: memfd: not permitted"),
        (Machine(shm=(64 << 20, 60 << 20)), NOTE, "/dev/shm", "60 MiB free of 64 MiB"),
        (Machine(shm=None), NOTE, "/dev/shm", "is missing"),
        (
            Machine(files={"/proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 1048576 kB\n"}),
            NOTE,
            "memory",
            "1 GiB available of 4 GiB",
        ),
    ],
)
def test_the_host(machine: Machine, level: str, topic: str, words: str) -> None:
    assert words in only(examine(machine, H100), level, topic)


def test_limits_of_cgroups() -> None:
    two = {
        "/proc/self/cgroup": "0::/job/step\n",
        "/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n",
        "/sys/fs/cgroup/job/memory.max": str(16 * GIB),
        "/sys/fs/cgroup/job/memory.current": str(4 * GIB),
        "/sys/fs/cgroup/job/step/memory.max": "max\n",
        "/sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/job/cpu.max": "250000 100000\n",
    }
    report = examine(Machine(files=two), H100)
    assert "12 GiB available of 64 GiB; this process's cgroup may use 16 GiB" in render(report)
    assert "may use 2.5 of them" in only(report, NOTE, "CPUs")

    report = examine(Machine(files=two | {"/sys/fs/cgroup/job/step/cpu.max": "400000 100000\n"}), H100)
    assert "may use 2.5 of them" in only(report, NOTE, "CPUs")  # the tighter of two

    one = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/pod\n4:memory:/pod\n",
        "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(3 * GIB),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000",
    }
    report = examine(Machine(files=one), H100)
    assert bad(report) == []
    assert "3 GiB available; this process's cgroup may use 3 GiB" in render(report)
