"""The driver of the engines that tests and benchmarks start."""

from __future__ import annotations

import pytest

from lab.engine import EngineFailed
from tests.system.e2e.conftest import START_AND_STOP_S, Rig

pytestmark = pytest.mark.timeout(START_AND_STOP_S)


def test_an_answer_that_json_does_not_have_is_an_error(rig: Rig) -> None:
    """It was lost, and the driver waited for it."""
    with rig.serve(rig.tiny, rig.patient) as engine:
        with pytest.raises(EngineFailed, match="type is not JSON serializable"):
            engine.call("builtins:type")
        assert engine.metrics()
