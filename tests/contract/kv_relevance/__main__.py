"""`python -m tests.contract.kv_relevance DIRECTORY VERSION`: the tables against any vLLM's sources.

DIRECTORY: an unpacked wheel's `vllm`, which need not be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contract.kv_relevance import wrong

if __name__ == "__main__":
    found = wrong(Path(sys.argv[1]), sys.argv[2])
    print("\n".join(found) or "every field has its row")
    raise SystemExit(1 if found else 0)
