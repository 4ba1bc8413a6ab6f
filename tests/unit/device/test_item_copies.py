"""Encoder outputs to a slab and back."""

from __future__ import annotations

import mmap
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

from s3kv.device.item_copies import CudaItems, ItemCopies, item_copies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def opened(device: str, dtype: torch.dtype) -> tuple[ItemCopies, memoryview]:
    index = torch.device(device, 0) if device == "cuda" else torch.device(device)
    copies = item_copies(dtype, index)
    slab = memoryview(mmap.mmap(-1, 2**20))
    copies.attach(slab)
    return copies, slab


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_saved_is_loaded(device: str, dtype: torch.dtype) -> None:
    copies, slab = opened(device, dtype)
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((1, 1), (32, 128), (7, 33)):
        batch = torch.randn((3, rows, width), generator=generator).to(dtype).to(device)
        for tensor in (batch[1], batch[1].t().contiguous().t()):  # a view, and strided
            nbytes = rows * width * dtype.itemsize
            payload = slab[4096 : 4096 + nbytes]
            before = bytes(slab[4096 + nbytes : 8192 + nbytes])
            copies.save(tensor, payload).synchronize()
            assert payload == tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            assert slab[4096 + nbytes : 8192 + nbytes] == before
            loaded = copies.load(payload, rows, width)
            assert loaded.device.type == device
            assert loaded.dtype is dtype
            assert torch.equal(loaded.cpu(), tensor.cpu())
            payload[:] = bytes(nbytes)
            assert torch.equal(loaded.cpu(), tensor.cpu()), "it is a copy"
    copies.close()


@pytest.mark.parametrize("device", DEVICES)
def test_time_is_told_once_the_device_has_come_so_far(device: str) -> None:
    copies, _ = opened(device, torch.float32)
    started, stopped = copies.now(), copies.now()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = copies.seconds_between(started, stopped)  # type: ignore[arg-type]
    assert seconds >= 0
    copies.close()


def test_a_save_is_awaited_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without one would be given a context on the first GPU, which takes memory there."""
    cuda, here = MagicMock(), torch.device("cpu", 3)
    for name in ("Stream", "current_stream", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.Tensor, "record_stream", Mock())
    CudaItems(torch.float32, here).save(torch.zeros(4), memoryview(bytearray(16))).synchronize()
    chosen, waited = call.device(here), call.Stream().record_event().synchronize()
    begun, ended = call.device().__enter__(), call.device().__exit__(None, None, None)
    assert cuda.mock_calls[-4:] == [chosen, begun, waited, ended]
