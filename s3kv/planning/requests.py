"""One request's dealings with the cache, and the table of what may happen to it.

NEW ──WAIT──▶ WAITING ──OFFER──▶ OFFERED ──LOAD──▶ LOADING ──LOADED──▶ COMPUTING
 └─────NOTHING / ADMIT──▶ COMPUTING ──LOOKUP (preempted, or its load failed)──▶ NEW
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from s3kv.host.slots import Slot
from s3kv.planning.ledger import Job


class RequestState(enum.Enum):
    NEW = "new"
    """Known to the engine, not asked about yet (its chunks may be on their way already)."""
    WAITING = "waiting"
    """The engine asked and was told to ask again later."""
    OFFERED = "offered"
    """The engine was told of chunks in host memory; they are leased until it decides."""
    LOADING = "loading"
    """Its chunks are being copied to device blocks."""
    COMPUTING = "computing"
    """The engine computes it; nothing is leased."""


class RequestEvent(enum.Enum):
    LOOKUP = "lookup"
    WAIT = "wait"
    OFFER = "offer"
    NOTHING = "nothing"
    ADMIT = "admit"
    LOAD = "load"
    LOADED = "loaded"


_NEW, _WAITING, _OFFERED, _LOADING, _COMPUTING = RequestState

REQUEST_TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_NEW, RequestEvent.LOOKUP): _NEW,
    (_NEW, RequestEvent.WAIT): _WAITING,
    (_NEW, RequestEvent.OFFER): _OFFERED,
    (_NEW, RequestEvent.NOTHING): _NEW,
    (_NEW, RequestEvent.ADMIT): _COMPUTING,
    (_WAITING, RequestEvent.LOOKUP): _WAITING,
    (_WAITING, RequestEvent.WAIT): _WAITING,
    (_WAITING, RequestEvent.OFFER): _OFFERED,
    (_WAITING, RequestEvent.NOTHING): _NEW,
    # Without an answer, when the engine skips lookups for this request.
    (_WAITING, RequestEvent.ADMIT): _COMPUTING,
    # Asked again because the engine could not place it after the offer.
    (_OFFERED, RequestEvent.LOOKUP): _NEW,
    (_OFFERED, RequestEvent.ADMIT): _COMPUTING,
    (_OFFERED, RequestEvent.LOAD): _LOADING,
    (_LOADING, RequestEvent.LOADED): _COMPUTING,
    (_COMPUTING, RequestEvent.ADMIT): _COMPUTING,
    (_COMPUTING, RequestEvent.LOOKUP): _NEW,
}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What the planner keeps of one request.

    Chunk positions count from the start of the prompt. The chunks `first … ready` are resident
    and, until the engine has decided, leased; `ready … asked` have been asked for; from `end` on
    nothing is asked for any more.
    """

    request_id: str
    block_hashes: Sequence[bytes]
    """The engine's own growing list, one hash per full hash block."""
    state: RequestState = RequestState.NEW
    hashes: list[bytes] = field(default_factory=list)
    first: int = 0
    ready: int = 0
    asked: int = 0
    end: int | None = None
    window: int = 0
    local_tokens: int = 0
    prefix: list[Slot] = field(default_factory=list)
    """The leases of the chunks `first … ready`, or none."""
    early: dict[int, Slot] = field(default_factory=dict)
    """Leases of chunks behind `ready`, which arrived before one that is still missing."""
    pending: dict[int, Job] = field(default_factory=dict)
    news: bool = False
    """Something ended since the last lookup, or that one left something to be asked for."""
    started_s: float | None = None
    wait_until_s: float = 0.0
    asked_s: float = 0.0
    """When it last asked for, or joined, a fetch."""
    arrival_s: float = 0.0
    """When something last arrived for it, or its wait began."""
    wanted_chunks: int = 0
    """What it might get from the bucket, as of `started_s`."""
    fetched: set[int] = field(default_factory=set)
    """Chunks that came from the bucket for this request, for the hit statistics."""
    barred: bool = False
    """A load of its failed, the cache was reset under it, or its KV may be wrong or of unknown
    place for another reason: no loads and no saves any more."""
    block_ids: list[int] = field(default_factory=list)
    saved: int = 0
    """Chunks before this one have been saved or deliberately not, but for the `undecided`."""
    undecided: list[int] = field(default_factory=list)
    """Chunks computed here while their fetch was still under way: saved if it comes to nothing."""

    def step(self, event: RequestEvent) -> None:
        try:
            self.state = REQUEST_TRANSITIONS[self.state, event]
        except KeyError:
            raise AssertionError(
                f"{event} is not possible for request {self.request_id} in {self.state}"
            ) from None

    @property
    def waits(self) -> bool:
        """Its next chunk is on its way, and it has not been answered without that one."""
        return self.ready in self.pending and (self.end is None or self.ready < self.end)

    @property
    def wants_chunks(self) -> bool:
        """An arriving chunk should be leased for it."""
        return self.state in (RequestState.NEW, RequestState.WAITING) and not self.barred

    def awaits(self, position: int) -> bool:
        """The chunk at `position` is still of use to it when it arrives."""
        return self.wants_chunks and (self.end is None or position < self.end)

    def start_over(self) -> None:
        """The engine has preempted the request and asks for its prefix again."""
        self.end = None
        self.started_s = None
        self.fetched.clear()
