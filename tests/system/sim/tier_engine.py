"""An engine with vLLM's offloading, in the place of vLLM's scheduler and workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from lab.books import check
from tests.system.sim.meaning import Dictionary, Shard
from tests.system.sim.rank import Slab
from tests.unit.planning.oracle import content_of
from tests.unit.planning.setup import Setup, hash_of


class Host(Protocol):
    setup: Setup
    rng: random.Random
    dictionary: Dictionary
    longest_wait_s: float

    @property
    def is_served(self) -> bool: ...

    def shards(self) -> list[Shard]: ...


_LONGEST_STEP_S = 0.5


class Key(bytes):
    """vLLM has sets of keys. In every process these have the same order."""

    def __hash__(self) -> int:
        return int.from_bytes(self[:7], "big")


@dataclass(eq=False)
class TierRequest:
    """chain: the prefix ids of its prompt, `known`, and of what it will sample. stored: number of
    chunks that were offered. copies: of its chunks, under way."""

    context: ReqContext
    chain: list[int]
    known: int
    computed: int = 0
    stored: int = 0
    copies: int = 0
    asked_s: float = 0.0
    waited_s: float = 0.0
    is_loaded: bool = False
    over: bool = False

    @property
    def request_id(self) -> str:
        return str(self.context.req_id)


@dataclass(eq=False)
class Copy:
    """From or to rows, by key, done as late as `due_s`."""

    request: TierRequest
    rows: dict[bytes, int]
    due_s: float
    is_load: bool


class TierEngine:
    """One life of an engine: asks, copies and computes as vLLM's scheduler and workers do."""

    def __init__(self, node: Host, manager: TieringOffloadingManager, slab: Slab) -> None:
        self.manager = manager
        (self.tier,) = manager.secondary_tiers
        self.planner = self.tier.planner
        self.now_s = 0.0
        self.waiting: list[TierRequest] = []
        self.running: list[TierRequest] = []
        self.loading: dict[str, TierRequest] = {}
        self.copies: list[Copy] = []
        self.finished: list[TierRequest] = []
        """Not signalled to the manager yet."""
        self.seen: Counter[str] = Counter()
        self._node, self._setup, self._view = node, node.setup, slab.view
        self._weights = 0
        self._preempted: list[str] = []
        self._announced: set[bytes] = set()

    def what_happened(self) -> Counter[str]:
        return self.seen + Counter(self.planner.counters)

    def arrive(self, request_id: str, tokens: list[int], max_new_tokens: int) -> None:
        chain = self._node.dictionary.chain([*tokens, *[7] * max_new_tokens])
        request = TierRequest(ReqContext(req_id=request_id), chain, len(tokens))
        self.manager.on_new_request(request.context)
        self.waiting.append(request)

    def abort(self, request: TierRequest) -> None:
        loads = request.request_id in self.loading
        state = "loading" if loads else "running" if request in self.running else "waiting"
        self.seen[f"aborted while {state}"] += 1
        self._leave(request)

    def _leave(self, request: TierRequest) -> None:
        request.over = True
        self.finished.append(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def preempt(self, request: TierRequest) -> None:
        """Its blocks are another's next, so what it stores is copied first."""
        self.seen["preempted"] += 1
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._preempted.append(request.request_id)
        request.computed, request.is_loaded = 0, False
        for copy in self.copies:
            if copy.request is request:
                copy.due_s = self.now_s

    def reset(self, weights: int) -> None:
        """New weights; the old ones stay while a load is under way. All that ran begins again, and
        no copy ends later."""
        for request in [*reversed(self.running)]:
            self.preempt(request)
        self.seen["resets refused" if self.loading else "resets"] += 1
        self._weights = self._weights if self.loading else weights
        for copy in self.copies:
            copy.request.copies -= 1
            if copy.is_load:
                self._loaded(copy)
        self.copies.clear()
        self._signal()
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()
        for request in self.waiting:
            request.stored, request.asked_s = 0, 0.0  # the reset itself may take seconds
        self._announced.clear()

    def step(self, budget: int) -> None:
        self._end_copies()
        begun = [request for request in [*self.waiting] if self._begins(request)]
        for request in self.running:
            request.computed = min(len(request.chain), request.computed + budget)
        new = [request.request_id for request in begun]
        self.manager.on_schedule_end(ScheduleEndContext(new, self._preempted))
        self._preempted = []
        for request in (*self.running, *self.finished):
            self._store(request)
        self._signal()
        for request in [*self.running]:
            if request.computed >= len(request.chain):
                self.seen["finished"] += 1
                self._leave(request)
        self._follow_events()
        check(self.planner)
        assert self.tier.broken is None, f"the tier has failed in {self.tier.broken}"

    def _begins(self, request: TierRequest) -> bool:
        """Whether a waiting request begins to compute; it may have to wait, or to load first."""
        if request.copies:
            return False
        found = request.computed if request.is_loaded else self._found(request)
        if found is None:
            self.seen["waits"] += 1
            since_s, request.asked_s = request.asked_s, self.now_s
            if self._node.is_served and since_s:  # a reset of another engine stops all of them
                request.waited_s += min(self.now_s - since_s, _LONGEST_STEP_S)
            assert request.waited_s <= self._node.longest_wait_s, "a request waits for ever"
            return False
        self.waiting.remove(request)
        request.asked_s = request.waited_s = 0.0
        if request.is_loaded or not found:
            self.running.append(request)
            return True
        request.computed, request.stored = found, found // self._setup.chunk_tokens
        self.loading[request.request_id] = request
        keys = self._keys(request, found)
        self._copy(request, keys, self.manager.prepare_load(keys, request.context), is_load=True)
        return False

    def _found(self, request: TierRequest) -> int | None:
        """The tokens that can be loaded. None: ask again."""
        size, tokens, defers = self._setup.chunk_tokens, request.known - 1, True
        while defers:
            asked, defers = tokens, False
            for group in range(len(self._setup.tables)):
                hits = self._prefix(request, group, tokens)
                if hits == 0:
                    return 0
                defers |= hits is None
                tokens = tokens if hits is None else hits * size
            if defers and tokens == asked:
                return None
        return tokens

    def _prefix(self, request: TierRequest, group: int, tokens: int) -> int | None:
        hits, defers = 0, False
        for key in self._keys_of(request, group, tokens):
            result = self.manager.lookup(key, request.context)
            if result is LookupResult.MISS:
                break
            defers |= result is not LookupResult.HIT
            hits += result is not LookupResult.RETRY
        return None if defers else hits

    def _keys_of(self, request: TierRequest, group: int, tokens: int) -> list[bytes]:
        """vLLM's keys of the whole chunks among the first tokens."""
        size = self._setup.chunk_tokens
        ends = range(size, tokens + 1, size)
        keys = [Key(hash_of(request.chain[end - 1]) + group.to_bytes(4, "big")) for end in ends]
        for key, end in zip(keys, ends, strict=True):
            request.context.set_offload_key_position(key, end)
        return keys

    def _keys(self, request: TierRequest, tokens: int, first: int = 0) -> list[bytes]:
        groups = range(len(self._setup.tables))
        return [key for group in groups for key in self._keys_of(request, group, tokens)[first:]]

    def _store(self, request: TierRequest) -> None:
        """Offer the chunks that were computed since the last time; again if there is no room."""
        keys = self._keys(request, request.computed, request.stored)
        if not keys or request.request_id in self.loading:
            return
        output = self.manager.prepare_store(keys, request.context)
        if output is None:
            self.seen["stores without room"] += 1
            return
        request.stored = request.computed // self._setup.chunk_tokens
        if output.keys_to_store:
            self._copy(request, output.keys_to_store, output.store_spec, is_load=False)

    def _signal(self) -> None:
        for request in self.finished:
            self.manager.on_request_finished(request.context)
        self.finished = []

    def _follow_events(self) -> None:
        for event in self.manager.take_events():
            if event.medium is Medium.STORAGE:
                known = self._announced
                (known.difference_update if event.removed else known.update)(event.keys)
                self.seen["removals announced"] += event.removed
        index, chunk = self.planner.index, self.tier._chunk
        gone = [name for name in self._announced if not index.is_present(chunk(name))]
        assert not gone, f"{len(gone)} chunks are gone, and no event says so"

    def _copy(
        self, request: TierRequest, keys: Sequence[bytes], spec: Any, *, is_load: bool
    ) -> None:
        due_s = self.now_s + self._node.rng.choice([0.0, 0.01, 0.2, 0.8])
        rows = dict(zip(keys, spec.chunk_ids.tolist(), strict=True))
        request.copies += 1
        self.copies.append(Copy(request, rows, due_s, is_load))

    def _end_copies(self) -> None:
        for copy in [copy for copy in self.copies if copy.due_s <= self.now_s]:
            self.copies.remove(copy)
            copy.request.copies -= 1
            keys, context = [*copy.rows], copy.request.context
            if copy.is_load:
                self._loaded(copy)
                self.manager.complete_load(keys, context)
                continue
            for key, row in copy.rows.items():
                content = self._content(key)
                self._row(row, content)[:] = content
            self.manager.complete_store(keys, context)

    def _loaded(self, copy: Copy) -> None:
        self.seen["loads"] += 1
        for key, row in copy.rows.items():
            content = self._content(key)
            assert self._row(row, content) == content, f"wrong bytes are loaded from row {row}"
        request = self.loading.pop(copy.request.request_id)
        request.is_loaded = True
        if not request.over:
            self.waiting.insert(0, request)

    def _row(self, row: int, content: bytes) -> memoryview:
        return self._view[row * self.tier.block_size_bytes :][: len(content)]

    def _content(self, key: bytes) -> bytes:
        chain = self._node.dictionary.covered(key[:-4])
        coverage = self._setup.coverage(int.from_bytes(key[-4:], "big"))
        last = len(chain) // coverage.chunk_tokens - 1
        tokens = content_of(self._setup, coverage, chain, last, self._weights)
        return self._node.shards()[0].payload(tokens, coverage.block_tokens)
