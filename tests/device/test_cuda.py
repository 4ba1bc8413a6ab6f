"""What no simulated GPU has."""

from __future__ import annotations

import pytest
import torch

from s3kv.device.copies import BlockCopies, open_copier
from tests.device.caches import Shape, build, places


@pytest.mark.gpu
def test_the_slab_is_pinned_until_the_end() -> None:
    caches = build(Shape("LBNHC"), "cuda", torch.Generator().manual_seed(3))
    where, _ = places(caches, caches.layout())
    slab = memoryview(where.slab)
    copies = BlockCopies(open_copier(where))
    assert copies.statistics().pinned
    assert where.memory.is_pinned()
    copies.close()
    assert not torch.frombuffer(slab, dtype=torch.uint8).is_pinned()
