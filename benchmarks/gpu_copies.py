"""KV blocks between a GPU and host memory: `python -m benchmarks.gpu_copies [--out FILE]`.

Random blocks of Llama-3-8B, Llama-3-70B on 8 GPUs and DeepSeek-V3, in chunks of 256 tokens, by the
copies as a worker has them.

- throughput: GB/s of saves and loads, beside one large copy of pinned memory over the same bus in
  the same round (goal: 0.92 of it)
- launch: microseconds of the engine's thread for a chunk of 32 layers and 16 blocks (goal: 30)
- drag: how much slower matrix products, and a loop of small kernels as of a model that decodes, get
  while chunks are saved, or loaded, without a pause, and at the pace of an engine (goal: 3 %). Once
  more for the loop with the small copies between host and GPU that an engine makes in every step

Every part is written to FILE when it is measured; after --seconds no part is begun. Times are of
events on the GPU or of the host between two synchronisations, medians of --rounds after one that is
not counted; all bytes are noise. `--device cpu` tries the program on a machine without a GPU: its
figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.deadline import ends
from benchmarks.gpu import drag, launch, throughput
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.report import Report, command_line
from benchmarks.gpu.rig import CopyRig
from benchmarks.gpu.shapes import LLAMA_8B, MODELS, TINY

BLOCK_TOKENS = (16, 32, 64, 128)
GOALS = {"of_large": 0.92, "launch_us": 30, "slower": 0.03}


@ends(1800)
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = command_line(__doc__, seconds=420, mib=1024).parse_args(arguments)
    machine = Machine(options.device)
    small = not machine.is_gpu
    report = Report("gpu_copies", machine, options, goals=GOALS)
    # What a session with little time has to bring home comes first.
    chunks = 20 if small else 300
    model = TINY if small else LLAMA_8B
    report.part("launch", partial(launch.measure, machine, model, 16, chunks))
    copied_bytes = 2**20 if small else options.mib * 2**20
    for block_tokens in BLOCK_TOKENS[-1:] if small else BLOCK_TOKENS:
        for shape in (TINY,) if small else MODELS:
            report.part(
                f"throughput, {shape.name}, {block_tokens} tokens",
                partial(
                    throughput.measure, machine, shape, block_tokens, copied_bytes, options.rounds
                ),
            )
        if block_tokens in (16, 128):
            _drag(report, machine, block_tokens, copied_bytes, options.rounds)
    return report.finish()


def _drag(
    report: Report, machine: Machine, block_tokens: int, copied_bytes: int, rounds: int
) -> None:
    small = not machine.is_gpu
    works: dict[str, Callable[[], Callable[[], object]]] = {
        "matrix products": partial(drag.products, machine, 64 if small else 8192),
        "decoding": lambda: _decoding(machine),
        "decoding with small copies": lambda: drag.with_small_copies(machine, _decoding(machine)),
    }
    steps = {name: 4 if small else 400 for name in works}
    if not small:
        steps["matrix products"] = 200

    def measured(name: str) -> dict[str, Any]:
        rig = CopyRig(machine, TINY if small else LLAMA_8B, block_tokens, copied_bytes)
        return drag.measure(machine, rig, works[name](), steps=steps[name], rounds=rounds)

    for name in works:
        report.part(f"drag, {name}, {block_tokens} tokens", partial(measured, name))


def _decoding(machine: Machine) -> Callable[[], object]:
    return drag.decoding(machine, *((32, 4096) if machine.is_gpu else (2, 64)))


if __name__ == "__main__":
    main()
