"""The slab: sizes, sharing, prefaulting, closing, and refusing what the machine cannot give."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from s3kv.host import slab as slab_module
from s3kv.host.limits import MemoryLimits, memory_limits
from s3kv.host.slab import Slab

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
    arguments = [sys.executable, "-c", code, str(slab.fd)]
    subprocess.run(arguments, pass_fds=(slab.fd,), check=True)
    assert bytes(slab.view[-4:]) == b"pong"
    slab.close()


def test_nobody_can_resize() -> None:
    slab = Slab.create(2 * PAGE)
    for nbytes in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, nbytes)
    slab.close()


def test_no_name_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    slab = Slab.create(PAGE)
    assert set(os.listdir("/dev/shm")) - before == set()
    slab.close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_prefault_allocates_every_page_and_changes_none(
    monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    if old_kernel:
        monkeypatch.setattr(slab_module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as it was then
    slab = Slab.create(33 * 2**20 + PAGE)
    slab.view[5 * PAGE] = 7
    assert resident_bytes(slab) == PAGE
    slab.prefault()
    assert resident_bytes(slab) == slab.nbytes
    assert (slab.view[5 * PAGE], slab.view[6 * PAGE]) == (7, 0)
    slab.close()


def test_prefault_stops_when_told() -> None:
    slab = Slab.create(64 * 2**20)
    answers = iter([False, False, True])
    slab.prefault(lambda: next(answers))
    assert resident_bytes(slab) == 32 * 2**20
    slab.close()


def test_prefault_beside_a_writer_loses_nothing() -> None:
    slab = Slab.create(64 * 2**20)
    rng = random.Random(1)
    offsets = [rng.randrange(0, slab.nbytes // PAGE) * PAGE for _ in range(2000)]
    thread = threading.Thread(target=slab.prefault)
    thread.start()
    for offset in offsets:
        slab.view[offset] = 1
    thread.join()
    assert all(slab.view[offset] == 1 for offset in offsets)
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


def test_close_without_slices_unmaps() -> None:
    before = mappings()
    slab = Slab.create(PAGE)
    assert mappings() == before + 1
    slab.close()
    assert mappings() == before


def test_more_than_there_is_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"host_bytes asks for .* available here.*set host_bytes"):
        Slab.create(memory_limits().available_bytes * 2)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="host_bytes"):
        Slab.create(2**62)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_failing_mapping_names_the_setting_and_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_limit = MemoryLimits(2**63, None, None, None)
    monkeypatch.setattr(slab_module, "memory_limits", lambda: without_limit)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="host_bytes"):
        Slab.create(2**60)
    assert len(os.listdir("/proc/self/fd")) == descriptors
