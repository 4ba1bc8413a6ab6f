"""An asyncio loop without a clock and without a selector: time jumps to the next timer.

What runs on it is real asyncio code (tasks, timeouts, events), and it runs the same way every
time: callbacks in the order in which they were asked for, timers by time and then by that order.
Sockets, threads and executors do not exist here, so code that reaches for one fails.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Its stub has all methods, so that type checkers allow an instance without a selector.
    Loop = asyncio.BaseEventLoop
else:
    Loop = asyncio.AbstractEventLoop


@dataclass
class Owner:
    """Collects the tasks that are created in its context: what dies with a simulated process."""

    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    dead: bool = False

    def die(self) -> None:
        self.dead = True
        for task in [*self.tasks]:
            task.cancel()

    def take(self, task: asyncio.Task[Any]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if self.dead:
            task.cancel()  # before its first step, so that it never does anything


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)

_SPIN_LIMIT = 100_000
"""Callbacks at one moment. A simulated second has a few thousand."""


class VirtualLoop(Loop):
    """`run_until` is called from outside of any callback, by whoever drives the simulation."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        """What nobody caught."""
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0

    def run_until(self, when_s: float) -> None:
        """Run everything that is due until then, and let it be then."""
        asyncio._set_running_loop(self)
        try:
            self._run_ready()
            while self._timers and self._timers[0][0] <= when_s:
                due_s, _, timer = heapq.heappop(self._timers)
                self._now_s = max(self._now_s, due_s)
                if not timer.cancelled():
                    timer._run()
                    self._run_ready()
        finally:
            asyncio._set_running_loop(None)
        self._now_s = max(self._now_s, when_s)

    def give_up(self) -> None:
        """Cancel what still runs, or the interpreter would do it, at a time of its own."""
        for _ in range(3):
            for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
                task.cancel()
            self.run_until(self._now_s + 60.0)

    def _run_ready(self) -> None:
        for _ in range(_SPIN_LIMIT):
            if not self._ready:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        raise AssertionError(f"at {self._now_s} s the loop runs and runs, and no time passes")

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon
    """There is one thread."""

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name)
        owner = OWNER.get()
        if owner is not None:
            owner.take(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context.get('message')}: {error!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass
