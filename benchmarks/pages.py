"""What huge pages do for host memory of a GPU: `python -m benchmarks.pages [GiB] [rounds] [gpu]`.

A slab of each kind in a process of its own, in turn: how long it takes to have all its pages
allocated; and, with the word `gpu` as third argument, how long CUDA takes to register the slab, how
much of the GPU's memory that costs, and how fast 16 MiB at a time go over the bus. The best of the
rounds. A slab is allocated and given back before the one that is timed: in a virtual machine the
first to use a page waits for the host to have it, too. Linux has to give huge pages
(/sys/kernel/mm/transparent_hugepage/shmem_enabled); where it does not, ordinary ones alone are
measured.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from time import perf_counter

from benchmarks.deadline import ends, say
from s3kv.host.placement import FIRST_TOUCH, NodeChoice, gives_huge_pages, shmem_policy
from s3kv.host.slab import Slab

PIECE_BYTES = 16 * 2**20
GIB = 2**30


def measure(nbytes: int, *, huge_pages: bool, gpu: bool) -> dict[str, float]:
    """One round, in this process."""
    node = near_the_gpu() if gpu else FIRST_TOUCH
    first = Slab.create(nbytes, node=node, huge_pages=huge_pages)
    first.prefault()
    first.close()
    slab = Slab.create(nbytes, node=node, huge_pages=huge_pages)
    start_s = perf_counter()
    slab.prefault()
    result = {"allocate_s_per_gib": (perf_counter() - start_s) * GIB / nbytes}
    return result | bus(slab) if gpu else result


def near_the_gpu() -> NodeChoice:
    import torch

    from s3kv.device.selection import memory_near

    return memory_near(torch.device("cuda", 0))


def bus(slab: Slab) -> dict[str, float]:
    """Registered with CUDA, and copied by DMA."""
    import torch

    from s3kv.device.gpu.pinning import register, unpin

    memory = torch.frombuffer(slab.view, dtype=torch.uint8)
    there = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device="cuda")
    free_bytes, _ = torch.cuda.mem_get_info()
    start_s = perf_counter()
    registered, refusal = register(memory, PIECE_BYTES, there.device)
    result = {"register_s_per_gib": (perf_counter() - start_s) * GIB / slab.nbytes}
    taken_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    result["gpu_bytes_per_gib"] = taken_bytes * GIB / slab.nbytes
    if refusal is not None:
        sys.exit(f"{refusal.reason}: {refusal.remedy}")
    pieces = memory.split(PIECE_BYTES)
    for name, to_gpu in (("to_gpu_gb_s", True), ("from_gpu_gb_s", False)):
        torch.cuda.synchronize()
        start_s = perf_counter()
        for piece in pieces:
            to, source = (there, piece) if to_gpu else (piece, there)
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        result[name] = slab.nbytes / 1e9 / (perf_counter() - start_s)
    unpin(registered)
    return result


def run(nbytes: int, huge_pages: bool, gpu: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.pages", "--once"]
    command += [str(nbytes), str(huge_pages), str(gpu)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@ends(600)
def main() -> None:
    if sys.argv[1:2] == ["--once"]:
        nbytes, huge_pages, gpu = int(sys.argv[2]), sys.argv[3] == "True", sys.argv[4] == "True"
        print(json.dumps(measure(nbytes, huge_pages=huge_pages, gpu=gpu)))
        return
    nbytes = int(float(sys.argv[1] if len(sys.argv) > 1 else 1) * GIB) // PIECE_BYTES * PIECE_BYTES
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    gpu = sys.argv[3:4] == ["gpu"]
    kinds = {"ordinary": False}
    if gives_huge_pages(shmem_policy()):
        kinds["huge"] = True
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for kind, huge_pages in kinds.items():
            found[kind].append(run(nbytes, huge_pages, gpu))
    report = {
        "kernel": platform.release(),
        "shmem_enabled": shmem_policy(),
        "memory": near_the_gpu().because if gpu else FIRST_TOUCH.because,
        "bytes": nbytes,
        "rounds": rounds,
        "best": {kind: best(each) for kind, each in found.items()},
    }
    print(json.dumps(report, indent=2))


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The least seconds and memory, and the most bytes per second."""
    least = {"allocate_s_per_gib", "register_s_per_gib", "gpu_bytes_per_gib"}
    return {
        name: round((min if name in least else max)(one[name] for one in rounds), 4)
        for name in rounds[0]
    }


if __name__ == "__main__":
    main()
