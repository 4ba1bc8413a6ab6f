"""`Directory`: objects in files on a local disk, shared by all processes of one user on a host.

    {disk_path}/v3/{namespace digest}/{hh}/{block hash}.g{coverage}-{shard}.safetensors
    {disk_path}/writing/     files that are not whole yet, each locked by its writer
    {disk_path}/used         the bytes of all files; its lock guards it
    {disk_path}/cleaning     the lock of the process that deletes files

A file holds the object as the bucket has it. It is written under another name and renamed, so a
file with an object's name is complete unless the machine lost power: nothing is synced, because
readers verify. The kernel releases the locks of a process that dies. Its unfinished file is then
unlocked and gets deleted; the bytes that it reserved count until the next scan.

All methods block, and may be called in any thread and by several at once. They raise `OSError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from s3kv.errors import ConfigError
from s3kv.place import Place, copy_bytes

_log = logging.getLogger("s3kv.io")

PIECE_BYTES = 2**20
"""Bytes read or written between two checks whether the result is still wanted."""
_FREE_SHARE = 0.05
_MOST_FREE_BYTES = 10 * 2**30
"""Share of the file system that stays free, and its upper limit: other programs write there."""
_LOCK_TRIES = 400
_LOCK_PAUSE_S = 0.005
"""A file system under heavy write-back may take a second for one call under the lock."""
_OBJECTS = "v3"
"""The folder of all objects: `objects.keys.LAYOUT`, which no store imports."""
_FOLDERS = _OBJECTS, "writing"
_WRONG_SETTING = FileExistsError, NotADirectoryError, PermissionError
_NEW = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

Lock = contextlib.AbstractContextManager[Any]
NO_LOCK: Lock = contextlib.nullcontext()

Written = Literal["written", "there", "full", "over"]
"""Result of a write: done; the object existed; there is no room; the result is not wanted."""
IsOver = Callable[[], bool]
"""Whether the result is no longer wanted. Called in the thread that reads or writes."""


@dataclass(frozen=True, slots=True)
class File:
    """A file that holds an object. used_s: last use, seconds since the epoch."""

    path: str
    nbytes: int
    used_s: float


class Directory:
    """The files of one directory. prefix: of the keys; file names leave it out.

    most_bytes: budget of all files; a file's bytes are reserved before it is written. Every process
    that shares the directory enforces its own value; give all the same.
    """

    def __init__(self, path: Path, prefix: str, most_bytes: int) -> None:
        self.path, self.prefix, self.most_bytes = path, prefix, most_bytes

    @classmethod
    def open(cls, path: str, prefix: str, most_bytes: int) -> Directory:
        """The setting `disk_path` as a directory, created if missing. Raises `ConfigError` if it is
        not a directory, or if other users own it or can write to it. A failing disk raises nothing:
        it may work again later, and its engine has to start."""
        directory = cls(Path(path), prefix, most_bytes)
        try:
            _make_folder(directory.path)
            directory._make_folders()
        except _WRONG_SETTING as error:
            raise ConfigError(f"disk_path {path!r} cannot be used: {error.strerror}") from error
        except OSError as error:
            _log.warning("disk_path %r cannot be used for now: %s", path, error.strerror)
        return directory

    def _make_folders(self) -> None:
        _check_owner(self.path)
        for folder in (self.path / name for name in _FOLDERS):
            _make_folder(folder)
            _check_owner(folder)

    def file_of(self, key: str) -> Path:
        """The file of an object's key."""
        folder, _, name = key.removeprefix(f"{self.prefix}/").rpartition("/")
        return self.path / f"{folder}.{name}"

    def key_of(self, path: str) -> str:
        """The key of an object's file, the inverse of `file_of`."""
        folder, name = os.path.split(os.path.relpath(path, self.path))
        return f"{self.prefix}/{folder}/{name.replace('.', '/', 1)}"

    def file_bytes(self, nbytes: int) -> int:
        """Length of the file of an object of `nbytes`."""
        return nbytes

    def read(self, key: str, place: Place, is_over: IsOver, lock: Lock = NO_LOCK) -> int | None:
        """Read an object into the front of `place`, and record its use. Returns its length, which
        may exceed the place; None if there is no such file, or `is_over`. Nothing writes to `place`
        afterwards. lock: held for each check of `is_over` and the write to `place` that follows;
        not while the disk is read, which may hang."""
        path = self.file_of(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(0, f"{path} is not a file of this user")
            with contextlib.suppress(OSError):  # read-only
                os.utime(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            wanted = place.cut(0, min(status.st_size, place.nbytes))
            return status.st_size if _read(fd, wanted, is_over, lock) else None
        finally:
            os.close(fd)

    def write(self, key: str, place: Place, is_over: IsOver) -> Written:
        """Write the object in `place`."""
        path, nbytes = self.file_of(key), place.nbytes
        if os.path.exists(path):
            return "there"
        if (reserved := self._reserve(nbytes)) is None:
            return "full"
        result: Written = "over"
        fd, temporary = reserved
        try:
            if _fill(fd, place, is_over):
                result = self._rename(temporary, path)
        finally:
            os.close(fd)
            if result != "written":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                self._add(-nbytes)
        return result

    def _rename(self, temporary: str, path: Path) -> Written:
        """Give a whole file its name, unless another writer was faster."""
        _make_folder(path.parent)
        with self._locked():
            if os.path.exists(path):
                return "there"
            os.rename(temporary, path)
        return "written"

    def delete(self, path: str | Path) -> int:
        """Delete a file, if it is there. Returns its bytes."""
        try:
            nbytes = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return 0
        self._add(-nbytes)
        return nbytes

    def used_bytes(self) -> int | None:
        """The bytes of all files, with those reserved for writers; None before the first scan.
        Recreates deleted folders, but not the directory: its disk may be unmounted."""
        self._make_folders()
        with self._locked() as fd:
            return _read_used(fd)

    def missing_bytes(self) -> int:
        """Bytes by which the file system's free space is too small; 0 if it is large enough."""
        status = os.statvfs(self.path)
        wanted = min(_MOST_FREE_BYTES, int(_FREE_SHARE * status.f_blocks * status.f_frsize))
        return max(0, wanted - status.f_bavail * status.f_frsize)

    def _reserve(self, nbytes: int) -> tuple[int, str] | None:
        """A new file to write, open and locked, and its path; None if there is no room. No scan
        finds it without its lock or its length."""
        if self.missing_bytes():
            return None
        with self._locked() as used_fd:
            used = _read_used(used_fd)
            if used is None or used + nbytes > self.most_bytes:
                return None
            fd, path = tempfile.mkstemp(dir=self.path / "writing")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(fd, nbytes)
                _write_used(used_fd, used + nbytes)
            except OSError:
                os.close(fd)
                os.unlink(path)
                raise
            return fd, path

    def _add(self, nbytes: int) -> None:
        with self._locked() as fd:
            if (used := _read_used(fd)) is not None:
                _write_used(fd, max(0, used + nbytes))

    def correct(self, scanned_bytes: int, before_bytes: int | None) -> None:
        """Record the result of a scan. before_bytes: `used_bytes` at its start. Bytes written since
        then are taken as missed by the scan; the next one corrects them."""
        with self._locked() as fd:
            used = _read_used(fd)
            since = 0 if used is None or before_bytes is None else max(0, used - before_bytes)
            _write_used(fd, scanned_bytes + since)

    def files(self) -> Iterator[File]:
        """All objects, in any order. Files that are deleted meanwhile are left out."""
        for folder, _, names in os.walk(self.path / _OBJECTS, onerror=_unless_gone):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(path := os.path.join(folder, name))
                    yield File(path, status.st_size, status.st_mtime)

    def unfinished_bytes(self) -> int:
        """The bytes of the files that are being written. Those whose writer is dead are deleted."""
        nbytes = 0
        for entry in os.scandir(self.path / "writing"):
            gone = contextlib.suppress(FileNotFoundError)
            with gone, self._locked(), self._open(entry.path, os.O_RDWR) as fd:
                if _try_lock(fd):
                    os.unlink(entry.path)
                else:
                    nbytes += os.fstat(fd).st_size
        return nbytes

    @contextlib.contextmanager
    def cleaning(self) -> Iterator[bool]:
        """Act as the one process that deletes files, for the block. Yields False if another is."""
        with self._open(str(self.path / "cleaning"), _NEW) as fd:
            yield _try_lock(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file `used`, locked. Raises `BlockingIOError` if a process holds the lock for long,
        which only a stopped one does."""
        with self._open(str(self.path / "used"), _NEW) as fd:
            tries = 0
            while not _try_lock(fd):
                tries += 1
                if tries == _LOCK_TRIES:
                    raise BlockingIOError(0, f"{self.path / 'used'} is locked")
                time.sleep(_LOCK_PAUSE_S)
            yield fd

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        fd = os.open(path, flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def _unless_gone(error: OSError) -> None:
    """Raise the error of a listing unless the folder is gone: else its files would not count."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, all for this user alone."""
    if folder != folder.parent and not os.path.exists(folder.parent):
        _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)


def _check_owner(folder: Path) -> None:
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(0, f"{folder} is not a directory (nor may it be a link to one)")
    if status.st_uid != os.geteuid():
        raise PermissionError(0, f"{folder} belongs to user {status.st_uid}, not {os.geteuid()}")
    if status.st_mode & 0o022:
        raise PermissionError(0, f"others may write to {folder}: `chmod 700` it")


def _read(fd: int, place: Place, is_over: IsOver, lock: Lock) -> bool:
    """Fill all of `place`; False if `is_over`, or the file is shorter."""
    at, buffer = 0, memoryview(bytearray(min(PIECE_BYTES, place.nbytes)))
    for piece in place.pieces(PIECE_BYTES):
        left = piece
        while left:
            count = os.preadv(fd, [buffer[: len(left)]], at)
            with lock:
                if not count or is_over():
                    return False
                copy_bytes([buffer[:count]], left)
            at, left = at + count, left[count:]
    return True


def _fill(fd: int, place: Place, is_over: IsOver) -> bool:
    """Write all of `place`; False if `is_over`."""
    at = 0
    for piece in place.pieces(PIECE_BYTES):
        left = piece
        while left:
            if is_over():
                return False
            count = os.pwritev(fd, [left], at)
            at, left = at + count, left[count:]
    return True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_used(fd: int) -> int | None:
    """The recorded bytes; None if the file is new."""
    data = os.pread(fd, 8, 0)
    return int.from_bytes(data, "little") if len(data) == 8 else None


def _write_used(fd: int, nbytes: int) -> None:
    os.pwrite(fd, nbytes.to_bytes(8, "little"), 0)
