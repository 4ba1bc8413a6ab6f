"""The kinds of device that the suite runs on, and how a test acts as the engine there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from s3kv.device.copier import Copier
from s3kv.device.copies import open_copier
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.slot_payloads import ChunkPlaces
from tests.unit.device.simulated import SimulatedGpu, void

GPUS = ("simulated", "cuda")
KINDS = ("cpu", *GPUS)

A_WHILE_CYCLES = 200_000_000
"""Some 0.1 s of a GPU's time."""


class Device:
    """kind: one of `KINDS`. memory: where torch puts its caches. seed: of what is left to chance,
    which is nothing but on a simulated GPU."""

    seed = 0

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.memory = "cuda" if kind == "cuda" else "cpu"

    def open(self, places: ChunkPlaces) -> Copier:
        return open_copier(places)

    def launch(self, work: Callable[[], object]) -> None:
        """Do, as the engine would, what `work` launches."""
        work()

    def stall(self) -> None:
        """Launch what takes the engine's stream longer than a test needs for what follows. On a
        simulated GPU it takes until `go_on`."""
        torch.cuda._sleep(A_WHILE_CYCLES)  # type: ignore[no-untyped-call]

    def go_on(self) -> None:
        return

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        if self.kind == "cuda":
            torch.cuda.synchronize()


class SimulatedDevice(Device):
    """A new GPU for each `open`; the engine launches to the last one. seed: of the next one."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind)
        self.seed = seed
        self.gpu = SimulatedGpu(seed)

    def open(self, places: ChunkPlaces) -> Copier:
        # Threads wait for it here, half a millisecond at a time.
        self.gpu = SimulatedGpu(self.seed, eagerness=(0.5, 0.9, 0.99))
        self.seed += 1
        return GpuCopier(places, self.gpu)

    def launch(self, work: Callable[[], object]) -> None:
        self.gpu.current.run(lambda: void(work()))

    def stall(self) -> None:
        self.gpu.current.stall()

    def go_on(self) -> None:
        self.gpu.current.go_on()

    def synchronize(self) -> None:
        self.gpu.synchronize()


def make_device(kind: str, seed: int) -> Device:
    return SimulatedDevice(kind, seed) if kind == "simulated" else Device(kind)
