"""Huge pages: what Linux says it gives, and that every mapping asks."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from s3kv.host import slab as slab_module
from s3kv.host.huge import SETTING, gives_huge_pages, shmem_policy
from s3kv.host.slab import Slab

ALL = f"{SETTING}/shmem_enabled"
SIZE = f"{SETTING}/hpage_pmd_size"
OWN = f"{SETTING}/hugepages-2048kB/shmem_enabled"
HUGE_BYTES = 2 * 2**20


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
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert shmem_policy(tmp_path) == policy


@pytest.mark.parametrize(
    ("policy", "gives"),
    [("advise", True), ("within_size", True), ("never", False), ("deny", False), (None, False)],
)
def test_what_gives(policy: str | None, gives: bool) -> None:
    assert gives_huge_pages(policy) is gives


def mapping_of(address: int) -> dict[str, str]:
    """What /proc/self/smaps says of the mapping that begins there."""
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


def address_of(slab: Slab) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slab.view))


def advised(slab: Slab) -> bool:
    return "hg" in mapping_of(address_of(slab))["VmFlags"].split()


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
    assert "huge pages as far as there are any" in caplog.text
    assert advised(slab)
    other = Slab.attach(slab.fd)
    assert not advised(other)
    other.ask_for_huge_pages()
    assert advised(other)
    del other
    slab.view[:4] = b"ping"
    slab.prefault()
    assert bytes(slab.view[:5]) == b"ping\0"


def test_not_asked_for() -> None:
    slab = Slab.create(2 * HUGE_BYTES)
    assert not advised(slab)
    slab.close()


@pytest.mark.parametrize(
    ("policy", "told"), [("never", "shmem_enabled is 'never'"), (None, "no huge ones")]
)
def test_ordinary_pages_are_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str | None,
    told: str,
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
        "from s3kv.host.slab import Slab; from tests.host.test_huge import *\n"
        "slab = Slab.create(16 * HUGE_BYTES, huge_pages=True); slab.prefault()\n"
        "print(mapping_of(address_of(slab))['ShmemPmdMapped'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() != "0 kB", "no page was huge"
