"""A local disk in memory, under the real `Directory`: the calls of the kernel that it makes.

`Disk` is the hardware with its file system: files, locks, free space, and a condition that fails
calls. `Kernel` is what one process sees of it; a process that is killed does nothing more, leaves
its files as they are, and loses its locks. `under` puts them in the place of `os`, `fcntl`,
`tempfile` and `time` of `s3kv.stores.disk`. Between any two calls of one process, all others may
run: see `BlockingCall`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import random
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from s3kv.place import copy_bytes
from s3kv.stores import disk as stores_disk

ROOT = "/disk"


class Killed(BaseException):
    """Ends the threads of a process that is dead: no `except` of the code under test takes it."""


class BlockingCall:
    """A function in a thread of its own, which runs only while `step` waits for it.

    So functions that block run in virtual time, side by side, and the same way every time.
    """

    running = threading.local()
    """`call`: that of this thread; `kernel`: of the process that it belongs to."""

    def __init__(self, work: Callable[[], Any], kernel: Kernel | None = None) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work, self._kernel = work, kernel
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._pause_s: float | None = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def step(self) -> float | None:
        """Go on until the next pause. Returns its length in seconds; None at the end."""
        self._turn.release()
        self._pause.acquire()
        return self._pause_s

    def pause(self, seconds: float) -> None:
        """In the thread: let the others run."""
        self._pause_s = seconds
        self._pause.release()
        self._turn.acquire()

    def _run(self) -> None:
        self._turn.acquire()
        self.running.call, self.running.kernel = self, self._kernel
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - it is another thread's
            self.error = error
        self._pause_s = None
        self._pause.release()


@dataclass(frozen=True)
class Condition:
    """How a disk behaves for a while. slowest_s: pause between two calls. read, change: weights of
    what becomes of calls that read and that change something; "ok", "hang", "flip", or an errno."""

    name: str
    slowest_s: float = 0.02
    read: dict[str, float] = field(default_factory=dict)
    change: dict[str, float] = field(default_factory=dict)
    is_full: bool = False

    def fate(self, changes: bool, rng: random.Random) -> str:
        weights = self.change if changes else self.read
        if not weights:
            return "ok"
        (fate,) = rng.choices([*weights], [*weights.values()])
        return fate


HEALTHY = Condition("healthy")
CONDITIONS = (
    (HEALTHY, 4),
    (Condition("slow", 2.0), 3),
    (Condition("failing", 0.1, {"ok": 9, "EIO": 1}, {"ok": 9, "EIO": 1}), 2),
    (Condition("rotten", 0.02, {"ok": 3, "flip": 1}, {"ok": 6, "flip": 1}), 2),
    (Condition("hanging", 0.1, {"ok": 4, "hang": 1}, {"ok": 15, "hang": 1}), 5),
    (Condition("full", is_full=True), 1),
    (Condition("out of quota", change={"ok": 4, "ENOSPC": 1}), 1),
    (Condition("read-only", change={"EROFS": 1}), 1),
    (Condition("broken", 0.1, {"EIO": 1}, {"EIO": 1}), 1),
)
HANGS_S = (2.0, 8.0, 20.0)


@dataclass(eq=False)
class File:
    """locked_by: the number of the descriptor. damaged: by the disk, and not by s3kv."""

    data: bytearray = field(default_factory=bytearray)
    modified_s: float = 0.0
    locked_by: int | None = None
    damaged: bool = False


@dataclass
class Disk:
    """check_object: sees every object that gets its name, and every one that is opened. accuse: is
    told of what must not be. clock: seconds since the epoch, for the times of files. is_sound: it
    stays healthy."""

    rng: random.Random
    most_bytes: int
    clock: Callable[[], float]
    accuse: Callable[[str], None] = lambda what: None
    check_object: Callable[[str, bytes], None] = lambda path, data: None
    capacity_bytes: int = 2**40
    is_sound: bool = False
    condition: Condition = HEALTHY
    folders: set[str] = field(default_factory=lambda: {"/", ROOT})
    bad_folders: set[str] = field(default_factory=set)
    """Folders that cannot be listed."""
    files: dict[str, File] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10_000))

    def objects(self) -> dict[str, File]:
        return {path: file for path, file in self.files.items() if path.startswith(f"{ROOT}/v3/")}

    @property
    def counted_bytes(self) -> int:
        """Of whole files and of those that are being written."""
        return sum(len(f.data) for path, f in self.files.items() if path.count("/") > 2)

    @property
    def free_bytes(self) -> int:
        return 0 if self.condition.is_full else max(0, self.capacity_bytes - self.counted_bytes)

    def lose_everything(self, *, folders: bool) -> None:
        """Somebody deletes all files in the directory, or the folders, too."""
        self.files.clear()
        if folders:
            self.folders = {"/", ROOT}

    def damage(self, path: str, data: bytes) -> None:
        file = self.files[path]
        file.data[:], file.damaged = data, True


class Kernel:
    """A disk as one process sees it: the functions of `os`, `fcntl` and `tempfile`.

    hung: is told how long a call hangs. reads_into: sees the memory that a read is about to fill.
    """

    def __init__(
        self,
        disk: Disk,
        hung: Callable[[float], None] = lambda seconds: None,
        reads_into: Callable[[memoryview], None] = lambda target: None,
    ) -> None:
        self.disk = disk
        self.dead = False
        self.reads_into = reads_into
        self._hung = hung
        self._open: dict[int, tuple[str, File]] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Calls of this thread are of this process, and nothing else runs meanwhile."""
        running = BlockingCall.running
        before, running.kernel = getattr(running, "kernel", None), self
        try:
            yield
        finally:
            running.kernel = before

    def die(self) -> None:
        self.dead = True
        writing = [path for path, _ in self._open.values() if path.startswith(f"{ROOT}/writing/")]
        self.disk.seen["writers killed"] += len(writing)
        objects = self.disk.objects()
        for fd, (path, file) in [*self._open.items()]:
            if objects.get(path) is file and not file.damaged:
                self.disk.check_object(key_of(path), bytes(file.data))
            self._close(fd)

    def _enter(self, path: str, *, changes: bool, fails: bool = True) -> str:
        """Before each call: time passes, and the call may fail. Returns what becomes of it."""
        disk, rng = self.disk, self.disk.rng
        call = getattr(BlockingCall.running, "call", None)
        fate = disk.condition.fate(changes, rng) if fails else "ok"
        if call is not None and not self.dead:
            seconds = disk.condition.slowest_s * rng.random() ** 3
            if fate == "hang":
                seconds = rng.choice(HANGS_S)
                self._hung(seconds)
                disk.seen["disk calls that hang"] += 1
            if fate == "hang" or rng.random() < 0.4:
                call.pause(seconds)
        if self.dead:
            raise Killed
        if fate.startswith("E"):
            disk.seen["disk calls that fail"] += 1
            raise _error(fate, path)
        return fate

    # --- files and folders -------------------------------------------------------------------

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        path, disk = os.fspath(path), self.disk
        self._enter(path, changes=bool(flags & (os.O_RDWR | os.O_CREAT)))
        if path not in disk.files:
            if not flags & os.O_CREAT or posixpath.dirname(path) not in disk.folders:
                raise _error("ENOENT", path)
            disk.files[path] = File(modified_s=disk.clock())
        file, fd = disk.files[path], next(disk.numbers)
        if path in disk.objects() and not flags & os.O_RDWR and not file.damaged:
            disk.check_object(key_of(path), bytes(file.data))
        self._open[fd] = path, file
        return fd

    def mkstemp(self, dir: str | os.PathLike[str]) -> tuple[int, str]:
        path = f"{os.fspath(dir)}/tmp{next(self.disk.numbers)}"
        return self.open(path, os.O_RDWR | os.O_CREAT), path

    def close(self, fd: int) -> None:
        self._enter("", changes=False, fails=False)
        self._close(fd)

    def _close(self, fd: int) -> None:
        _, file = self._open.pop(fd)
        if file.locked_by == fd:
            file.locked_by = None

    def flock(self, fd: int, operation: int) -> None:
        self._enter("", changes=False, fails=False)
        file = self._open[fd][1]
        if file.locked_by not in (None, fd):
            raise _error("EAGAIN", "")
        file.locked_by = fd

    def fstat(self, fd: int) -> Any:
        self._enter("", changes=False, fails=False)
        return _status(self._open[fd][1])

    def lstat(self, path: str | os.PathLike[str]) -> Any:
        path = os.fspath(path)
        self._enter(path, changes=False)
        if path in self.disk.folders:
            return SimpleNamespace(st_mode=stat.S_IFDIR | 0o700, st_uid=os.geteuid())
        return _status(self._file(path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        try:
            self.lstat(path)
        except OSError:
            return False
        return True

    def utime(self, fd: int) -> None:
        self._enter("", changes=True)
        self._open[fd][1].modified_s = self.disk.clock()

    def truncate(self, fd: int, nbytes: int) -> None:
        self._enter("", changes=True)
        data = self._open[fd][1].data
        data[:] = data[:nbytes] + bytes(max(0, nbytes - len(data)))

    def unlink(self, path: str | os.PathLike[str]) -> None:
        path = os.fspath(path)
        self._enter(path, changes=True)
        self._file(path)
        del self.disk.files[path]
        self.disk.seen["objects deleted on a disk"] += path.startswith(f"{ROOT}/v3/")

    def rename(self, source: str, target: str | os.PathLike[str]) -> None:
        target, disk = os.fspath(target), self.disk
        self._enter(source, changes=True)
        file = self._file(source)
        if posixpath.dirname(target) not in disk.folders:
            raise _error("ENOENT", target)
        disk.files[target] = disk.files.pop(source)
        disk.seen["objects written to a disk"] += 1
        if not file.damaged:
            disk.check_object(key_of(target), bytes(file.data))

    def mkdir(self, path: str | os.PathLike[str], mode: int = 0o777) -> None:
        path = os.fspath(path)
        self._enter(path, changes=path not in self.disk.folders)
        if posixpath.dirname(path) not in self.disk.folders:
            raise _error("ENOENT", path)
        if path in self.disk.folders:
            raise _error("EEXIST", path)
        self.disk.folders.add(path)

    def scandir(self, path: str | os.PathLike[str]) -> list[Any]:
        folder = os.fspath(path)
        self._enter(folder, changes=False)
        if folder not in self.disk.folders:
            raise _error("ENOENT", folder)
        if folder in self.disk.bad_folders:
            raise _error("EIO", folder)
        paths = [path for path in self.disk.files if posixpath.dirname(path) == folder]
        return [SimpleNamespace(path=path, name=posixpath.basename(path)) for path in paths]

    def walk(
        self, top: str | os.PathLike[str], onerror: Callable[[OSError], None] | None = None
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        top = os.fspath(top)
        try:
            names = [entry.name for entry in self.scandir(top)]
        except OSError as error:
            if onerror is not None:
                onerror(error)
            return
        below = sorted(folder for folder in self.disk.folders if posixpath.dirname(folder) == top)
        yield top, [posixpath.basename(folder) for folder in below], names
        for folder in below:
            yield from self.walk(folder, onerror)

    def statvfs(self, path: str | os.PathLike[str]) -> Any:
        self._enter(os.fspath(path), changes=False)
        disk = self.disk
        return SimpleNamespace(f_blocks=disk.capacity_bytes, f_frsize=1, f_bavail=disk.free_bytes)

    def _file(self, path: str) -> File:
        if path not in self.disk.files:
            raise _error("ENOENT", path)
        return self.disk.files[path]

    # --- content -----------------------------------------------------------------------------

    def preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        """Perhaps fewer bytes than there are."""
        path, (buffer,) = self._open[fd][0], buffers
        fate = self._enter(path, changes=False)
        data = self._open[fd][1].data[at : at + len(buffer)]
        if data and self.disk.rng.random() < 0.1:
            data = data[: self.disk.rng.randrange(len(data)) + 1]
        if fate == "flip" and data:
            data[self.disk.rng.randrange(len(data))] ^= 1 << self.disk.rng.randrange(8)
        buffer[: len(data)] = data
        return len(data)

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        self._enter(self._open[fd][0], changes=False)
        return bytes(self._open[fd][1].data[at : at + nbytes])

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        """Perhaps fewer bytes than there are."""
        (buffer,), (path, file) = buffers, self._open[fd]
        fate = self._enter(path, changes=True)
        data = bytearray(buffer)
        if self.disk.condition.is_full:
            raise _error("ENOSPC", path)
        if data and self.disk.rng.random() < 0.1:
            data = data[: self.disk.rng.randrange(len(data)) + 1]
        if fate == "flip" and data:
            data[self.disk.rng.randrange(len(data))] ^= 1 << self.disk.rng.randrange(8)
            file.damaged = True
        file.data[at : at + len(data)] = data
        return len(data)

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        self._enter(self._open[fd][0], changes=True)
        self._open[fd][1].data[at : at + len(data)] = data
        return len(data)

    def sleep(self, seconds: float) -> None:
        call = getattr(BlockingCall.running, "call", None)
        if call is not None and not self.dead:
            call.pause(seconds)
        if self.dead:
            raise Killed


def key_of(path: str) -> str:
    """The key of the object in a file. Spelled out, and not taken from the code under test."""
    return path.replace(ROOT, "s3kv", 1).replace(".g", "/g", 1)


def _error(name: str, path: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), path)


def _status(file: File) -> Any:
    return SimpleNamespace(
        st_mode=stat.S_IFREG | 0o600,
        st_uid=os.geteuid(),
        st_size=len(file.data),
        st_mtime=file.modified_s,
    )


class _Calls:
    """A module whose functions are those of the kernel of the process that calls them."""

    def __init__(self, real: Any, names: str, **more: Any) -> None:
        self._real, self._names = real, names.split()
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        if name.isupper():
            return getattr(self._real, name)
        if name not in self._names:
            raise AttributeError(f"the disk in memory lacks {name}")
        return getattr(BlockingCall.running.kernel, name)


class _Paths:
    join, split, relpath = posixpath.join, posixpath.split, posixpath.relpath

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        found: bool = BlockingCall.running.kernel.exists(path)
        return found


def under() -> contextlib.AbstractContextManager[Any]:
    """During the block, `Directory` uses the disk in memory."""
    calls = (
        "open close fstat lstat utime preadv pread pwritev pwrite truncate unlink rename mkdir "
        "scandir walk statvfs"
    )
    fakes = {
        "os": _Calls(os, calls, path=_Paths, geteuid=os.geteuid, posix_fadvise=lambda *of: None),
        "fcntl": _Calls(stores_disk.fcntl, "flock"),
        "tempfile": _Calls(stores_disk.tempfile, "mkstemp"),
        "time": _Calls(stores_disk.time, "sleep"),
    }
    return mock.patch.multiple(stores_disk, copy_bytes=_copy_bytes, **fakes)


def _copy_bytes(views: Iterable[memoryview], target: memoryview) -> None:
    BlockingCall.running.kernel.reads_into(target)
    copy_bytes(views, target)
