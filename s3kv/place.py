"""`Place`: the memory of one object."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Memory of an object, or of a range of one: `header`, and behind it `payload`, which need not
    adjoin it.

    Both are contiguous bytes, and either may be empty. An object shorter than its place fills the
    header before the payload. A place owns no memory. Its creator keeps both buffers mapped, and
    leaves them alone until the coroutine or function that has the place ends.
    """

    header: memoryview
    payload: memoryview
    _both: memoryview | None = field(default=None, repr=False)
    """The buffer that consists of header and payload, if they adjoin."""

    @classmethod
    def of(cls, buffer: bytes | bytearray | memoryview, header_bytes: int = 0) -> Place:
        """One buffer as a place whose header is the first `header_bytes`."""
        view = memoryview(buffer)
        return cls(view[:header_bytes], view[header_bytes:], view)

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    @property
    def nbytes(self) -> int:
        return len(self.header) + len(self.payload)

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The bytes in order, in as few views as possible: at most two, none of them empty."""
        views = (self.header, self.payload) if self._both is None else (self._both,)
        return tuple(view for view in views if view)

    def cut(self, begin: int, end: int) -> Place:
        """The bytes from `begin` up to, but not including, `end`; 0 <= begin <= end."""
        seam = len(self.header)
        if self._both is not None:
            return Place.of(self._both[begin:end], max(0, min(seam, end) - begin))
        behind = slice(max(0, begin - seam), max(0, end - seam))
        return Place(self.header[begin:end], self.payload[behind])

    def pieces(self, most_bytes: int) -> Iterator[memoryview]:
        """The bytes in order, in views of at most `most_bytes`."""
        for view in self.views:
            for at in range(0, len(view), most_bytes):
                yield view[at : at + most_bytes]

    def write(self, data: bytes | bytearray | memoryview, begin: int = 0) -> None:
        """Copy `data` to the place from byte `begin` on. Raises `ValueError` if it does not fit."""
        if self._both is not None:
            self._both[begin : begin + len(data)] = data
            return
        source, part = memoryview(data), self.cut(begin, begin + len(data))
        seam = len(part.header)
        part.header[:], part.payload[:] = source[:seam], source[seam:]


def copy_bytes(parts: Iterable[bytes | memoryview], target: bytearray | memoryview) -> int:
    """Copy `parts` back to back to the front of `target`, without the GIL, and return their total
    length. Holding the GIL would stop the receiving threads, at 5 GB/s half of the time. Views must
    be of writable memory. Raises `ValueError` if the parts do not fit."""
    at = ctypes.addressof((ctypes.c_char * len(target)).from_buffer(target))
    nbytes = 0
    for part in parts:
        if nbytes + len(part) > len(target):
            raise ValueError(f"{nbytes + len(part)} bytes for {len(target)}")
        source = part if isinstance(part, bytes) else (ctypes.c_char * len(part)).from_buffer(part)
        ctypes.memmove(at + nbytes, source, len(part))
        nbytes += len(part)
    return nbytes
