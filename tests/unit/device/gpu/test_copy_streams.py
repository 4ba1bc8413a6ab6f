"""Where there are streams, they wait for each other, and the host for none of them."""

from __future__ import annotations

import torch

from s3kv.device.copies import BlockCopies
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.messages import CopyPart
from tests.unit.device.caches import Shape, build, places
from tests.unit.device.devices import Device
from tests.unit.device.simulated import SimulatedGpu

LONG_S = 10.0


def opened(gpu: Device, shape: Shape) -> BlockCopies:
    return BlockCopies(gpu.open(places(build(shape, gpu.memory))[0]))


def test_more_chunks_than_staging_buffers_wait_on_the_device_alone(gpu: Device) -> None:
    copies = opened(gpu, Shape("LBNHC"))
    gpu.stall()
    for job in range(12):
        copies.save(job, 0, job % 3, [0, 1])
        copies.load(str(job), [CopyPart(0, job % 3, 0, (2, 3)), CopyPart(0, 0, 1, (4,))])
    copies.fence(range(12))
    assert copies.poll() == ([], [])
    gpu.go_on()
    assert copies.wait_all(LONG_S)
    saved, loaded = copies.poll()
    assert [end.job_id for end in saved] == list(range(12))
    assert [end.load_id for end in loaded] == [str(job) for job in range(12)]
    copies.close()


def test_caches_made_in_inference_mode_can_be_loaded_into(gpu: Device) -> None:
    with torch.inference_mode():
        copies = opened(gpu, Shape("BLNHC"))
    copies.load("r", [CopyPart(0, 0, 0, (2, 3))])
    assert copies.wait_all(LONG_S)
    assert copies.poll().loaded == [("r", True)]
    copies.close()


def test_a_fence_of_a_save_waits_for_no_load() -> None:
    """Loads keep the copy engine into the GPU busy for as long as it takes."""
    gpu = SimulatedGpu(5, eagerness=[0.0])
    copier = GpuCopier(places(build(Shape("LBNHC", blocks=12)))[0], gpu)
    gpu.synchronize()
    mark = copier.mark()
    loads = [copier.copy_in(CopyPart(0, 1, 0, (2, 3)), mark) for _ in range(4)]
    while "in" not in gpu.engines:
        assert gpu.step()
    gpu.frozen.add(gpu.engines["in"].name)
    save = copier.copy_out(CopyPart(0, 0, 0, (0, 1)), copier.mark())
    save.fence()
    ran: list[str] = []
    gpu.current.run(lambda: ran.append("the engine's next step"))
    while gpu.step():
        pass
    assert ran, "the fence waits for loads"
    assert not any(load.done() for load in loads)
    gpu.frozen.clear()
    copier.close()
