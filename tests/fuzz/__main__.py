"""libFuzzer on one target: `python -m tests.fuzz objects [libFuzzer's options] [corpus]`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["s3kv", "json", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
