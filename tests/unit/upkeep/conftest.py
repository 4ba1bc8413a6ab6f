"""The slab of the tests of the I/O process."""

from __future__ import annotations

from tests.unit.io.conftest import slab as slab
