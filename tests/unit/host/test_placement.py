"""Placement: NUMA nodes chosen from what Linux writes and asked for in the real kernel, huge pages,
and the processors beside a model."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import multiprocessing
import os
import platform
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from s3kv.host import placement
from s3kv.host import slab as slab_module
from s3kv.host.placement import (
    SETTING,
    NodeChoice,
    beside_the_model,
    gives_huge_pages,
    node_mask,
    node_near,
    prefer_node,
    shmem_policy,
)
from s3kv.host.slab import Slab
from tests.project import plant

GPU = "0000:5e:00.0"
NODE = "sys/devices/system/node/"
DEVICE = f"sys/bus/pci/devices/{GPU}/numa_node"
TWO = {
    f"{NODE}has_cpu": "0-1\n",
    f"{NODE}has_memory": "0-1\n",
    f"{NODE}node0/cpulist": "0-7,16-23\n",
    f"{NODE}node1/cpulist": "8-15,24-31\n",
    f"{NODE}node4/cpulist": "32\n",
    DEVICE: "1\n",
}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_F_ADDR = 2
PAGE = mmap.PAGESIZE
ALL = f"{SETTING}/shmem_enabled"
SIZE = f"{SETTING}/hpage_pmd_size"
OWN = f"{SETTING}/hugepages-2048kB/shmem_enabled"
HUGE_BYTES = 2 * 2**20


def near(tmp_path: Path, files: dict[str, str], pci_address: str | None = GPU) -> NodeChoice:
    plant(tmp_path, files)
    return node_near(pci_address, tmp_path)


@pytest.mark.parametrize(
    ("change", "node", "because"),
    [
        ({}, 1, "on NUMA node 1, that of GPU 0000:5e:00.0"),
        ({DEVICE: "0\n"}, 0, "on NUMA node 0"),
        ({DEVICE: "-1\n"}, None, "reports none for GPU"),
        ({f"{NODE}has_cpu": "0\n"}, None, "the only NUMA node"),
        ({f"{NODE}has_memory": "0\n"}, None, "the only NUMA node"),
        ({f"{NODE}has_cpu": "0-1,4\n", f"{NODE}has_memory": "0-9\n", DEVICE: "4\n"}, 4, "node 4"),
        ({f"{NODE}has_memory": "0-9\n", DEVICE: "7\n"}, None, "reports none for GPU"),
        ({f"{NODE}has_memory": "\n"}, None, "the only NUMA node"),
        ({f"{NODE}has_memory": "what?\n"}, None, "reports no topology"),
    ],
)
def test_the_node_of_a_gpu(
    tmp_path: Path, change: dict[str, str], node: int | None, because: str
) -> None:
    found = near(tmp_path, TWO | change)
    assert found.node == node
    assert because in found.because


def test_what_is_not_known_is_left_to_linux(tmp_path: Path) -> None:
    assert near(tmp_path / "nothing", {}).node is None
    assert near(tmp_path, TWO).processors == {*range(8, 16), *range(24, 32)}
    assert near(tmp_path, TWO, None) == NodeChoice(
        None, "on any NUMA node (the GPU's PCI address is not known)"
    )
    (tmp_path / DEVICE).unlink()
    assert node_near(GPU, tmp_path).node is None


@pytest.mark.parametrize("node", [0, 1, 63, 64, 130])
def test_masks_have_one_bit(node: int) -> None:
    assert int.from_bytes(bytes(node_mask(node)), sys.byteorder) == 1 << node


def policy_at(address: int) -> tuple[int, int]:
    """The kernel's word on the page there: mode, and the set of nodes."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    done = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(GET_MEMPOLICY[platform.machine()]),
        ctypes.byref(mode),
        ctypes.byref(mask),
        ctypes.c_ulong(16 * 64),
        ctypes.c_void_p(address),
        ctypes.c_ulong(MPOL_F_ADDR),
    )
    assert done == 0, os.strerror(ctypes.get_errno())
    return mode.value, int.from_bytes(bytes(mask), sys.byteorder)


@pytest.fixture
def allowed() -> None:
    if prefer_node(*mapping(mmap.mmap(-1, PAGE)), 0) == f"mbind: {os.strerror(errno.EPERM)}":
        pytest.skip("this container forbids mbind(2)")


def mapping(memory: mmap.mmap) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


@pytest.mark.usefixtures("allowed")
def test_the_policy_is_the_files_and_holds_in_every_process() -> None:
    slab = Slab.create(8 * PAGE, node=NodeChoice(0, "on node 0"))
    before = policy_at(mapping(slab._map)[0])
    assert before == (placement._MPOL_PREFERRED, 1)
    code = (
        "import sys, ctypes; from s3kv.host.slab import Slab\n"
        "from tests.unit.host.test_placement import mapping, policy_at\n"
        "slab = Slab.attach(int(sys.argv[1]))\n"
        "print(policy_at(mapping(slab._map)[0]))\n"
    )
    assert printed(code, slab.fd) == str(before)
    slab.close()


def printed(code: str, *fds: int) -> str:
    """What a process prints that is handed these files, with their numbers as arguments."""
    command = [sys.executable, "-c", code, *map(str, fds)]
    return subprocess.check_output(command, pass_fds=fds, text=True).strip()


@pytest.mark.usefixtures("allowed")
def test_left_alone_there_is_no_policy() -> None:
    slab = Slab.create(PAGE)
    assert policy_at(mapping(slab._map)[0]) == (0, 0)
    assert not advised(slab)
    slab.close()


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container."""
    monkeypatch.setattr(slab_module, "prefer_node", lambda *args: "mbind: not permitted")


@pytest.mark.usefixtures("forbidden")
def test_without_the_call_the_pages_are_touched_from_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    there = frozenset({max(before)})
    ran_on: list[set[int]] = []
    populate = slab_module.populate

    def watched(address: int, nbytes: int) -> int:
        ran_on.append(os.sched_getaffinity(0))
        return populate(address, nbytes)

    monkeypatch.setattr(slab_module, "populate", watched)
    with caplog.at_level(logging.INFO):
        slab = Slab.create(8 * PAGE, node=NodeChoice(1, "on node 1", there | {4095}))
    assert ran_on == [there]
    assert os.sched_getaffinity(0) == before, "the engine's thread was moved"
    assert os.fstat(slab.fd).st_blocks * 512 == slab.nbytes
    assert "mbind: not permitted; allocating from processors of that node" in caplog.text
    slab.close()


def open_slabs() -> int:
    """Descriptors of this process; others come and go with the tests beside this one."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += "s3kv-slab" in os.readlink(f"/proc/self/fd/{number}")
    return count


@pytest.mark.usefixtures("forbidden")
def test_memory_that_is_not_there_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "populate", lambda *_: errno.ENOMEM)
    before = open_slabs()
    with pytest.raises(ConfigError, match=r"Cannot allocate memory\. Set host_bytes"):
        Slab.create(PAGE, node=NodeChoice(1, "on node 1", frozenset(os.sched_getaffinity(0))))
    assert open_slabs() <= before


@pytest.mark.usefixtures("forbidden")
def test_where_that_does_not_go_either_it_is_told_and_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slab = Slab.create(PAGE, node=NodeChoice(1, "on node 1", frozenset({4095})))
    assert "should be on node 1, but that was refused (mbind: not permitted)" in caplog.text
    assert "CAP_SYS_NICE" in caplog.text
    assert os.fstat(slab.fd).st_blocks == 0
    slab.view[:] = bytes(b"x" * PAGE)
    slab.close()


def test_the_kernels_reason_is_told() -> None:
    memory = mmap.mmap(-1, PAGE)
    assert prefer_node(*mapping(memory), 999).startswith("mbind: ")


def test_another_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in prefer_node(0, PAGE, 0)


@pytest.mark.parametrize(
    ("files", "policy"),
    [
        ({}, None),
        ({ALL: "always within_size advise [never] deny force\n"}, "never"),
        ({ALL: "always within_size [advise] never deny force\n"}, "advise"),
        ({ALL: "always within_size [advise] never deny force\n", SIZE: "2097152\n"}, "advise"),
        ({ALL: "[never]", SIZE: "2097152\n", OWN: "always [inherit] advise never\n"}, "never"),
        ({ALL: "[never]", SIZE: "2097152\n", OWN: "always inherit [advise] never\n"}, "advise"),
        ({ALL: "[deny]", SIZE: "2097152\n", OWN: "always inherit [advise] never\n"}, "deny"),
        ({ALL: "[force]", SIZE: "2097152\n", OWN: "always inherit advise [never]\n"}, "force"),
    ],
)
def test_what_linux_says(tmp_path: Path, files: dict[str, str], policy: str | None) -> None:
    plant(tmp_path, files)
    assert shmem_policy(tmp_path) == policy


def mapping_of(slab: Slab) -> dict[str, str]:
    """What /proc/self/smaps says of its mapping."""
    address, _ = mapping(slab._map)
    lines = iter(Path("/proc/self/smaps").read_text("ascii").splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found[name] = value.strip()
        if name == "VmFlags":
            return found
    raise AssertionError(f"nothing is mapped at {address:x}")


def advised(slab: Slab) -> bool:
    return "hg" in mapping_of(slab)["VmFlags"].split()


@pytest.fixture
def giving(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine gives huge pages, or is at least said to."""
    if shmem_policy() is None:
        pytest.skip("this kernel has no huge pages for shared memory")
    monkeypatch.setattr(slab_module, "shmem_policy", lambda: "advise")


@pytest.mark.usefixtures("giving")
def test_each_mapping_asks_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        slab = Slab.create(2 * HUGE_BYTES, huge_pages=True)
    assert "huge pages, as long as there are any" in caplog.text
    assert advised(slab)
    other = Slab.attach(slab.fd)
    assert not advised(other)
    other.ask_for_huge_pages()
    assert advised(other)
    del other
    slab.view[:4] = b"ping"
    slab.prefault()
    assert bytes(slab.view[:5]) == b"ping\0"


@pytest.mark.parametrize(
    ("policy", "told"), [("never", "shmem_enabled is 'never'"), (None, "no huge ones")]
)
def test_ordinary_pages_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str | None, told: str
) -> None:
    monkeypatch.setattr(slab_module, "shmem_policy", lambda: policy)
    with caplog.at_level(logging.INFO):
        slab = Slab.create(2 * HUGE_BYTES, huge_pages=True)
    assert told in caplog.text
    assert not advised(slab)
    slab.close()


def test_they_are_huge_where_linux_gives_them() -> None:
    if not gives_huge_pages(shmem_policy()):
        pytest.skip(f"/{ALL} gives none here")
    code = (
        "from s3kv.host.slab import Slab; from tests.unit.host.test_placement import *\n"
        "slab = Slab.create(16 * HUGE_BYTES, huge_pages=True); slab.prefault()\n"
        "print(mapping_of(slab)['ShmemPmdMapped'])\n"
    )
    assert printed(code) != "0 kB", "no page was huge"


def bound_worker(pipe: Connection) -> None:
    """As vLLM's worker: started by the core, and then bound."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pipe.send(beside_the_model())


def test_a_bound_worker_has_those_of_the_core_beside_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=bound_worker, args=(theirs,))
    worker.start()
    assert ours.recv() == os.sched_getaffinity(0)
    worker.join()


def test_a_process_of_nobodys_has_its_own() -> None:
    assert multiprocessing.parent_process() is None
    assert beside_the_model() == os.sched_getaffinity(0)
