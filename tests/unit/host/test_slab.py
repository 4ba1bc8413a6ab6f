"""The slab: sizes, sharing, prefaulting, closing, and refusing what the machine cannot give."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3kv.errors import ConfigError
from s3kv.host import slab as slab_module
from s3kv.host.limits import MemoryLimits
from s3kv.host.slab import Slab, slab_files
from tests.mutants import Patch

PAGE = mmap.PAGESIZE


def resident_bytes(slab: Slab) -> int:
    """Memory the file holds, as the kernel counts it."""
    return os.fstat(slab.fd).st_blocks * 512


def mappings() -> int:
    return Path("/proc/self/maps").read_text("ascii").count("memfd:s3kv-slab")


@pytest.mark.parametrize(("asked", "got"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_size_is_whole_pages_of_zeros(asked: int, got: int) -> None:
    slab = Slab.create(asked)
    assert (slab.nbytes, len(slab.view), os.fstat(slab.fd).st_size) == (got, got, got)
    assert bytes(slab.view) == bytes(got)
    slab.close()


def test_another_process_sees_the_same_bytes() -> None:
    slab = Slab.create(3 * PAGE)
    slab.view[PAGE : PAGE + 4] = b"ping"
    code = (
        "import sys; from s3kv.host.slab import Slab\n"
        "view = Slab.attach(int(sys.argv[1])).view\n"
        f"assert len(view) == {3 * PAGE}\n"
        f"assert bytes(view[{PAGE}:{PAGE}+4]) == b'ping'\n"
        "view[-4:] = b'pong'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(slab.fd)], pass_fds=(slab.fd,), check=True)
    assert bytes(slab.view[-4:]) == b"pong"
    slab.close()


def test_nobody_can_resize() -> None:
    slab = Slab.create(2 * PAGE)
    for nbytes in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, nbytes)
    slab.close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_it_allocates_every_page_and_changes_none(monkeypatch: Patch, old_kernel: bool) -> None:
    if old_kernel:
        monkeypatch.setattr(slab_module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as it was then
    slab = Slab.create(33 * 2**20 + PAGE)
    slab.view[5 * PAGE] = 7
    assert resident_bytes(slab) == PAGE
    slab.prefault()
    assert resident_bytes(slab) == slab.nbytes
    assert (slab.view[5 * PAGE], slab.view[6 * PAGE]) == (7, 0)
    slab.close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_several_threads_allocate_at_once(monkeypatch: Patch, old_kernel: bool) -> None:
    """They meet, so it takes two of them at the same time; the second processor may be missing."""
    meeting, populate = threading.Barrier(2), slab_module.populate
    before = os.sched_getaffinity(0)

    def met(address: int, nbytes: int) -> int:
        meeting.wait(60)
        return populate(address, nbytes)

    monkeypatch.setattr(slab_module, "populate", met)
    if old_kernel:
        monkeypatch.setattr(slab_module, "_MADV_POPULATE_WRITE", 9999)
    slab = Slab.create(4 * slab_module.PREFAULT_BYTES)
    slab.prefault(processors={min(before), 4095})
    assert resident_bytes(slab) == slab.nbytes
    assert os.sched_getaffinity(0) == before
    slab.close()


def test_an_error_of_one_thread_is_raised(monkeypatch: Patch) -> None:
    codes = iter([0, errno.ENOMEM, 0, 0])
    monkeypatch.setattr(slab_module, "populate", lambda *_: next(codes))
    slab = Slab.create(4 * slab_module.PREFAULT_BYTES)
    with pytest.raises(ConfigError, match="Cannot allocate memory"):
        slab.prefault(processors=os.sched_getaffinity(0) | {4095})
    slab.close()


def test_prefault_stops_when_told() -> None:
    slab = Slab.create(64 * 2**20)
    answers = itertools.chain([False, False], itertools.repeat(True))
    slab.prefault(lambda: next(answers))
    assert resident_bytes(slab) == 32 * 2**20
    slab.close()


def test_close_twice_and_with_a_slice_alive() -> None:
    slab = Slab.create(PAGE)
    fd, kept = slab.fd, slab.view[:8]
    slab.close()
    slab.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    kept[:] = b"still ok"
    assert bytes(kept) == b"still ok"


def test_more_than_there_is_names_the_setting() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for nbytes in (2 * PAGE * os.sysconf("SC_PHYS_PAGES"), 2**62):
        with pytest.raises(ConfigError, match=r"needed on this host, .* available.*Set host_by"):
            Slab.create(nbytes)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_failing_mapping_names_the_setting_and_leaks_nothing(monkeypatch: Patch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"Cannot allocate memory.*Set host_bytes"):
        Slab.create(PAGE)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


RANK_BYTES = 4 * 2**20
OTHERS_BYTES = 2**20
"""Memory that the engine itself uses."""


class Host:
    """A host with a limit, and no processes but this one and its sisters. What its slabs have taken
    is in use, as the kernel counts it."""

    def __init__(self, root: Path, monkeypatch: Patch) -> None:
        self._root = root
        self._sisters: list[subprocess.Popen[str]] = []
        self.limit_bytes = 2**40
        self.let_in(os.getpid())
        self._left = {os.stat(file).st_ino for file in slab_files(root)}
        """What other tests have left open in this process."""
        monkeypatch.setattr(slab_module, "slab_files", self.files)
        monkeypatch.setattr(slab_module, "memory_limits", self.limits)

    def let_in(self, pid: int) -> None:
        (self._root / "proc").mkdir(exist_ok=True)
        (self._root / "proc" / str(pid)).symlink_to(f"/proc/{pid}")

    def files(self) -> list[str]:
        return [file for file in slab_files(self._root) if os.stat(file).st_ino not in self._left]

    def limits(self) -> MemoryLimits:
        files = {os.stat(file).st_ino: os.stat(file) for file in self.files()}
        taken = sum(found.st_blocks * 512 for found in files.values())
        return MemoryLimits(2**62, self.limit_bytes, OTHERS_BYTES + taken, None)

    def sister(self, taken_bytes: int) -> None:
        """Another rank, which has made its slab and touched some of it."""
        code = (
            "import sys; from s3kv.host.slab import Slab\n"
            f"slab = Slab.create({RANK_BYTES}); slab.view[:{taken_bytes}] = bytes({taken_bytes})\n"
            "print('made', flush=True); sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        sister = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        self._sisters.append(sister)
        assert sister.stdout.readline() == "made\n"
        self.let_in(sister.pid)

    def close(self) -> None:
        for sister in self._sisters:
            sister.communicate()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: Patch) -> Iterator[Host]:
    host = Host(tmp_path, monkeypatch)
    yield host
    host.close()


RANKS = {"planned": ((2, RANK_BYTES, "host_bytes, per rank"),)}, r"\(host_bytes, per rank\) = 8,388"
ENGINES: Any = {}, r"\(slabs on this host\)"


@pytest.mark.parametrize(
    ("plan", "taken_bytes"),
    [(RANKS, None), *itertools.product([RANKS, ENGINES], [0, RANK_BYTES // 2, RANK_BYTES])],
)
def test_there_is_one_answer_whichever_comes_first(
    host: Host, plan: Any, taken_bytes: int | None
) -> None:
    """Of the ranks of an engine, or of engines. None: the sister has no slab yet; otherwise it may
    not have touched its memory."""
    options, said = plan
    if taken_bytes is not None:
        host.sister(taken_bytes)
    host.limit_bytes = OTHERS_BYTES + 2 * RANK_BYTES - 1
    before = mappings()
    with pytest.raises(ConfigError, match=f"2 × 4,194,304 {said}"):
        Slab.create(RANK_BYTES, **options)
    assert mappings() == before
    host.limit_bytes += 1
    Slab.create(RANK_BYTES, **options).close()


def test_of_two_that_are_made_at_the_same_time_one_at_least_is_refused(
    host: Host, monkeypatch: Patch
) -> None:
    """The sister makes hers when this process has found that there is room."""
    create = os.memfd_create

    def late(*arguments: Any) -> int:
        host.sister(0)
        return create(*arguments)

    monkeypatch.setattr(os, "memfd_create", late)
    host.limit_bytes = OTHERS_BYTES + 2 * RANK_BYTES - 1
    before = mappings()
    with pytest.raises(ConfigError, match="slabs on this host"):
        Slab.create(RANK_BYTES)
    assert mappings() == before


def test_a_process_that_holds_a_slab_twice_counts_once(host: Host) -> None:
    first = Slab.create(RANK_BYTES)
    again = Slab.attach(os.dup(first.fd))
    host.limit_bytes = OTHERS_BYTES + 2 * RANK_BYTES
    Slab.create(RANK_BYTES).close()
    for slab in (first, again):
        slab.close()


def test_the_file_behind_a_view_is_known_by_its_path(tmp_path: Path, monkeypatch: Patch) -> None:
    """File systems number alike."""
    slab = Slab.create(PAGE)
    with (tmp_path / "region").open("wb+") as file:
        file.truncate(PAGE)
        view = memoryview(mmap.mmap(file.fileno(), PAGE))
        found = os.fstat(file.fileno())
        monkeypatch.setattr(os, "stat", lambda path: found)
        other = Slab.behind(view)
        other.view[0] = 7
    assert (view[0], slab.view[0]) == (7, 0)
    other.close()
    slab.close()
