"""Ranks in a real container: a cgroup with a limit, in which the kernel kills."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

MIB = 2**20
RANKS, RANK_MIB = 4, 192
INTERPRETERS_MIB = 80
"""More than the interpreters of all ranks take, and less than half a slab: three never fit."""
CODE = f"""
import sys
from pathlib import Path
from s3kv.errors import ConfigError
from s3kv.host import slab
from s3kv.host.slab import Slab

def group(process):
    try:
        return (process / "cgroup").read_text()
    except OSError:  # has ended
        return ""

# A container sees its own processes alone.
everywhere, own = slab.slab_files, group(Path("/proc/self"))
slab.slab_files = lambda: [f for f in everywhere() if group(Path(f).parent.parent) == own]
planned = (({RANKS}, {RANK_MIB * MIB}, "host_bytes, per rank"),) if sys.argv[1] == "planned" else ()
print("ready", flush=True)
sys.stdin.readline()
try:
    slab = Slab.create({RANK_MIB * MIB}, planned=planned)
    slab.prefault()
    print("made", flush=True)
except ConfigError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def container() -> Iterator[Path]:
    """The directory of a new cgroup with memory for the interpreters and two and a half ranks."""
    limit_bytes = (INTERPRETERS_MIB + RANK_MIB * 5 // 2) * MIB
    for parent, limit_name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", parent, f"s3kv-test-{uuid4().hex}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit_name).write_text(str(limit_bytes))
            yield group
            return
        except OSError:  # this version does not control memory here
            continue
        finally:
            group.rmdir()
    pytest.skip("no cgroup with a memory limit can be made here: that takes root, and no container")


def ranks_in(container: Path, word: str) -> list[str]:
    """What each of four ranks says that make their slabs at the same time. None may be killed."""
    entry = 'echo 0 > "$0"/cgroup.procs && exec "$@"'
    command = ["/bin/sh", "-c", entry, str(container), sys.executable, "-c", CODE, word]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            rank.stdin.write("go\n")
            rank.stdin.flush()
        told = [rank.stdout.readline() for rank in ranks]
    finally:
        for rank in ranks:
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, (-signal.SIGKILL, told)
    return told


def test_all_ranks_of_an_engine_are_refused_with_their_sum(container: Path) -> None:
    for told in ranks_in(container, "planned"):
        assert f"4 × {RANK_MIB * MIB:,} (host_bytes, per rank) = 805,306,368 bytes" in told


def test_engines_that_do_not_know_of_each_other_never_take_too_much(container: Path) -> None:
    told = ranks_in(container, "alone")
    refused = [words for words in told if "slabs on this host" in words]
    assert len(refused) + told.count("made\n") == RANKS, told
    assert refused
