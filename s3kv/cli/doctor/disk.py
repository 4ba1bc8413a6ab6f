"""Checks of the directory of `disk_path`: access, file system, free space and speed."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from s3kv.cli.doctor.findings import Finding
from s3kv.config import Config, size
from s3kv.errors import ConfigError
from s3kv.stores.disk import Directory

FILES, FILE_BYTES = 4, 8 * 2**20
"""Number of files written and read to measure speed, and the bytes of each."""
MOUNTS = "/proc/self/mountinfo"
_REMEDY = "give the path of a directory that s3kv makes itself, on a disk of this host"
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\d*|ceph|lustre|gpfs|beegfs|gluster.*|9p|afs|gfs2|ocfs2|virtiofs|fuse.*"
)
_NOT_A_DISK = {
    "tmpfs": "memory, which counts against the container's limit, and is gone with it",
    "ramfs": "memory without a bound",
    "overlay": "the container's own layer, which is gone with the container",
}


def examine(config: Config, clock_s: Callable[[], float], *, read_only: bool) -> list[Finding]:
    """Check the directory, which is created if missing; no findings if `disk_path` is not set.
    clock_s: a monotonic clock. read_only: neither create nor write anything."""
    path = config.disk_path
    if path is None:
        return []
    if read_only:
        return [Finding("disk", "skipped", "not checked with --read-only")]
    try:
        directory = Directory.open(path, config.prefix, config.disk_bytes)
        findings = [
            Finding("disk", "ok", f"{path} can be used, and by this user alone"),
            _file_system(path, Path(MOUNTS).read_text()),
            _room(directory),
        ]
        return [*findings, _speed(directory, clock_s)]
    except ConfigError as error:
        return [Finding("disk", "fault", str(error), _REMEDY)]
    except OSError as error:
        told = f"files in {path} cannot be written and read: {error.strerror}"
        return [Finding("disk", "fault", told, _REMEDY)]


def _file_system(path: str, mounts: str) -> Finding:
    """Check the kind of file system. mounts: the text of /proc/self/mountinfo."""
    kind = kind_of(os.path.realpath(path), mounts)
    if kind in _NOT_A_DISK:
        told = f"{path} is on {kind}: {_NOT_A_DISK[kind]}"
        return Finding("disk kind", "warning", told, "mount a local disk there")
    if _NETWORK.fullmatch(kind):
        told = f"{path} is on {kind}, not on a local disk: it may be slower than the bucket, and "
        told += "locks and times of last use may not hold between hosts"
        return Finding("disk kind", "warning", told, _REMEDY)
    return Finding("disk kind", "ok", f"{path} is on {kind}")


def kind_of(path: str, mounts: str) -> str:
    """The type of the file system that holds a path, by the mounts. Pure."""
    kinds: dict[str, str] = {}
    for line in mounts.splitlines():
        point, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        kinds[re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)] = kind
    while path not in kinds and path != "/":
        path = os.path.dirname(path)
    return kinds.get(path, "an unknown file system")


def _room(directory: Directory) -> Finding:
    status = os.statvfs(directory.path)
    free, used = status.f_bavail * status.f_frsize, directory.used_bytes() or 0
    told = (
        f"disk_bytes is {size(directory.most_bytes)}; files take {size(used)} of it, and "
        f"{size(free)} are free"
    )
    if directory.missing_bytes() or free + used < directory.most_bytes:
        told += ". s3kv leaves a twentieth of the disk free, 10 GiB at most"
        return Finding("disk room", "warning", told, "set disk_bytes lower, or free the disk")
    return Finding("disk room", "ok", told)


def _speed(directory: Directory, clock_s: Callable[[], float]) -> Finding:
    """Write unnamed files, which vanish with this process, and read them from the disk: the kernel
    has dropped their pages. Raises `OSError`."""
    wrote_s = read_s = 0.0
    for _ in range(FILES):
        content = os.urandom(FILE_BYTES)
        with tempfile.TemporaryFile(dir=directory.path / "writing") as file:
            begin_s = clock_s()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            wrote_s += clock_s() - begin_s
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin_s = clock_s()
            is_same = file.read() == content
            read_s += clock_s() - begin_s
        if not is_same:
            told = "the bytes read are not those written"
            return Finding("disk speed", "fault", told, "replace the disk")
    written, read = (FILES * FILE_BYTES / 1e6 / max(s, 1e-9) for s in (wrote_s, read_s))
    told = (
        f"{written:,.0f} MB/s written with fsync, {read:,.0f} MB/s read back ({FILES} files of "
        f"{size(FILE_BYTES)}, one after another)"
    )
    return Finding("disk speed", "ok", told)
