"""A GPU of CPU memory that runs what was launched whenever a real one might, chosen by a seed.

Each stream is a queue. Nothing runs when it is launched; at every call from the host, as many steps
as the seed likes run, of any stream whose turn it may be. Sources are read and destinations written
at that moment, a long copy in several steps.

There is one copy engine for each direction. It goes on with a stream as long as that has copies one
behind the other, as was measured on real ones (pytorch/torchrec#4303); another stream's copy waits
until then, however urgent it is. Kernels run beside it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.gpu.gather import Stack, with_rows

Step = Callable[[], None]
NAMES = ("save pages", "save bus", "load pages", "load bus")
"""The copier's streams, in the order it makes them."""


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGpu, *, timed: bool = False) -> None:
        self.gpu = gpu
        self.timed = timed
        self.at: Op | None = None
        self.recorded_on = ""

    def query(self) -> bool:
        with self.gpu.lock:
            self.gpu.pass_time()
            return self.at is None or self.at.done

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """As long as the seed likes, up to some ms."""
        with self.gpu.lock:
            for event in (self, end):
                assert event.timed
                assert event.at.done
            return self.gpu.random.choice([0.0, 0.001, 0.1, 5.0])


@dataclass(eq=False)
class Op:
    """steps: what is left to do. after: what has to be done before. engine: the copy engine that it
    needs, "in" or "out"."""

    steps: deque[Step] = field(default_factory=deque)
    after: Op | None = None
    engine: str = ""
    done: bool = False

    @property
    def ready(self) -> bool:
        return self.after is None or self.after.done


class SimulatedStream:
    def __init__(self, gpu: SimulatedGpu, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self.queue: deque[Op] = deque()
        self.stalls: list[Op] = []
        self.weight = gpu.random.choice([1, 1, 10, 100])
        """How often it is its turn, against other streams."""

    def wait(self, event: SimulatedEvent) -> None:
        with self.gpu.lock:
            wait = (self.name, event.recorded_on)
            if event.at is None or wait == self.gpu.deaf:
                return
            self.gpu.waits.add(wait)
            self._launch(after=event.at)

    def record(self, event: SimulatedEvent) -> None:
        with self.gpu.lock:
            event.recorded_on = self.name
            event.at = self._launch()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.numel() == source.numel()

        def copy(begin: int, end: int) -> Step:
            return lambda: void(destination[begin:end].copy_(source[begin:end]))

        steps = [copy(*piece) for piece in self.gpu.torn(source.numel())]
        self._launch(steps, engine=self.gpu.engine_to(destination.data_ptr()))

    def fetch(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.numel() == source.numel()
        self._launch([lambda: void(destination.copy_(source))])

    def gather(self, stacks: Sequence[Stack], rows: torch.Tensor) -> None:
        def gather(stack: Stack, rows: torch.Tensor, begin: int, end: int) -> Step:
            return lambda: stack.gather(_of_blocks(stack, rows, begin, end), begin)

        self._launch(gather(*some, *piece) for some, piece in self._torn(stacks, rows))

    def scatter(self, stacks: Sequence[Stack], rows: torch.Tensor, first_block: int) -> None:
        def scatter(stack: Stack, rows: torch.Tensor, begin: int, end: int) -> Step:
            return lambda: stack.scatter(_of_blocks(stack, rows, begin, end), first_block + begin)

        self._launch(scatter(*some, *piece) for some, piece in self._torn(stacks, rows))

    def _torn(
        self, stacks: Sequence[Stack], rows: torch.Tensor
    ) -> Iterator[tuple[tuple[Stack, torch.Tensor], tuple[int, int]]]:
        for some in with_rows(stacks, rows):
            for piece in self.gpu.torn(len(some[1]) // some[0].rows_per_block):
                yield some, piece

    def run(self, work: Step) -> None:
        """Launch `work`, a kernel of the engine."""
        self._launch([work])

    def stall(self) -> None:
        """Nothing launched from now on runs before `go_on`."""
        self.stalls.append(Op())
        self._launch(after=self.stalls[-1])

    def go_on(self) -> None:
        for stall in self.stalls:
            stall.done = True

    def synchronize(self) -> None:
        with self.gpu.lock:
            while self.queue:
                if not self.gpu.step():
                    assert self.gpu.stalls_end, "the host waits for what does not end"
                    for stream in self.gpu.streams:
                        stream.go_on()

    def next_engine(self) -> str:
        """The copy engine that the stream needs next; empty if it needs something else before."""
        for op in self.queue:
            if op.steps or not op.ready:
                return op.engine if op.ready else ""
        return ""

    def _launch(
        self, steps: Iterator[Step] | Sequence[Step] = (), after: Op | None = None, engine: str = ""
    ) -> Op:
        with self.gpu.lock:
            self.gpu.fail_perhaps(self)
            op = Op(deque(steps), after, engine)
            self.queue.append(op)
            self.gpu.pass_time()
            return op


class SimulatedGpu:
    """deaf: a stream, and the stream whose events it forgets to wait for; names as in `NAMES`,
    the engine's streams are all "engine". eagerness: of which the seed draws one; how likely
    another step runs at each call. stalls_end: whether a stream's stall ends when the host waits.

    All methods may be called from any thread, and only one runs at a time.
    """

    def __init__(
        self,
        seed: int,
        deaf: tuple[str, str] | None = None,
        eagerness: Sequence[float] = (0.1, 0.5, 0.9, 0.99),
        stalls_end: bool = False,
    ) -> None:
        self.stalls_end = stalls_end
        self.deaf = deaf
        self.waits: set[tuple[str, str]] = set()
        """Which stream has waited for an event of which."""
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.eagerness = self.random.choice(eagerness)
        self.streams: list[SimulatedStream] = []
        self.current = self.engine_stream()
        self.failing = 0
        """After so many launches of the copier's, the next one fails; 0: none does."""
        self.pinned: tuple[int, int] | None = None
        self.engines: dict[str, SimulatedStream] = {}
        """The stream that each copy engine goes on with."""
        self.frozen: set[str] = set()
        """Names of streams of which nothing runs now: what they do takes that long."""

    def current_stream(self) -> SimulatedStream:
        return self.current

    def new_stream(self, *, urgent: bool) -> SimulatedStream:
        name = NAMES[sum(stream.name != "engine" for stream in self.streams)]
        assert urgent == name.startswith("load")
        return self._stream(name)

    def new_event(self, *, timed: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self, timed=timed)

    def host_numbers(self, count: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        numbers = torch.full((count,), 2**40)
        return numbers.numpy(), numbers

    def empty(self, nbytes: int) -> torch.Tensor:
        """Whoever had the memory before may still be writing to it, on the current stream."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.current.run(lambda: void(memory.fill_(0xEE)))
        return memory

    def enter_thread(self) -> None:
        return

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        self.pinned = memory.data_ptr(), memory.numel()
        return True

    def unpin(self) -> None:
        assert not any(stream.queue for stream in self.streams if stream.name != "engine")
        self.pinned = None

    def engine_stream(self) -> SimulatedStream:
        return self._stream("engine")

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def pass_time(self) -> None:
        """Run some steps, perhaps none."""
        while self.random.random() < self.eagerness and self.step():
            pass

    def step(self) -> bool:
        """Run one step of a stream that may; False when none may."""
        able = [stream for stream in self.streams if self._may_run(stream)]
        if not able:
            return False
        (stream,) = self.random.choices(able, [stream.weight for stream in able])
        op = stream.queue[0]
        if op.engine:
            self.engines[op.engine] = stream
        if op.steps:
            try:
                with torch.inference_mode():
                    op.steps.popleft()()
            except (IndexError, RuntimeError) as error:
                raise AssertionError("a kernel was told of blocks that there are not") from error
        if not op.steps:
            op.done = True
            stream.queue.popleft()
            if op.engine and stream.next_engine() != op.engine:
                del self.engines[op.engine]
        return True

    def _may_run(self, stream: SimulatedStream) -> bool:
        if not stream.queue or not stream.queue[0].ready or stream.name in self.frozen:
            return False
        return self.engines.get(stream.queue[0].engine, stream) is stream

    def engine_to(self, destination: int) -> str:
        """The copy engine that writes to this address."""
        begin, nbytes = self.pinned
        return "out" if begin <= destination < begin + nbytes else "in"

    def torn(self, length: int) -> list[tuple[int, int]]:
        """[0, length) in up to three pieces, in any order."""
        ends = [0, *sorted(self.random.randrange(length + 1) for _ in range(2)), length]
        pieces = [(a, b) for a, b in pairwise(ends) if a < b]
        self.random.shuffle(pieces)
        return pieces

    def fail_perhaps(self, stream: SimulatedStream) -> None:
        if stream.name != "engine" and self.failing:
            self.failing -= 1
            if not self.failing:
                raise RuntimeError("simulated: the launch failed")

    def _stream(self, name: str) -> SimulatedStream:
        self.streams.append(SimulatedStream(self, name))
        return self.streams[-1]


def _of_blocks(stack: Stack, rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return rows[begin * stack.rows_per_block : end * stack.rows_per_block]


def void(_: object) -> None:
    return
