"""The phrase check finds what it should, and the package passes it."""

from __future__ import annotations

import pytest

from scripts.check_docstrings import report
from scripts.check_english import faults


@pytest.mark.parametrize(
    "line",
    [
        'log.warning("%s is not what its key says", key)',
        'raise ValueError(f"{name} is no number")',
        'Metric("Chunks asked for in the bucket.")',
        'option("--x", help="To say what it saves")',
        'class Config:\n    x: int = 1\n    """Bytes on their way to the bucket."""',
        '@click.command()\ndef run():\n    """Look at the bucket."""',
    ],
)
def test_a_phrase_is_found(line: str) -> None:
    assert list(faults(line))


@pytest.mark.parametrize(
    "line",
    [
        'log.warning("%s failed verification", key)',
        'raise ValueError("there is no such file")',
        'assert x, "nobody reports it"',
        'def run():\n    """Look at what is told."""',
        'told = "said"',
    ],
)
def test_other_texts_pass(line: str) -> None:
    assert not list(faults(line))


def test_the_package_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(faults) == 0, capsys.readouterr().out
