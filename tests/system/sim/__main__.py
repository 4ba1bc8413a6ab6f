"""`python -m tests.system.sim SEED [--trace]` replays one run; `… FIRST COUNT` runs many; with
`--kept` they are fleets that keep a bucket to its budget, with `--shared` such whose engines share
chunks between parallel sizes, with `--tiers` such in which s3kv is a tier of vLLM's offloading, and
with `--disks` such whose engines have a local disk before the bucket."""

from __future__ import annotations

import sys

from tests.system.sim.runs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
