"""libFuzzer on one target: `python -m tests.system.fuzz objects [libFuzzer's options] [corpus]`.

Memory is limited by the system, so that too much of it is a MemoryError. libFuzzer's own limit
looks at the largest size the process ever had, which may be that of the one it was forked from.
"""

from __future__ import annotations

import resource
import sys

import atheris

with atheris.instrument_imports(include=["s3kv", "json", "tests.system.fuzz.targets"]):
    from tests.system.fuzz.chunks import chunks
    from tests.system.fuzz.targets import TARGETS

_MEMORY_BYTES = 2**30

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    target = (TARGETS | {"chunks": chunks})[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
