#!/usr/bin/env bash
# Fills VENV_DIR with the official wheel of vLLM, without its GPU packages: enough for its scheduler, which is what
# `make test-vllm-scheduler` runs.
#   bash install-official.sh VENV_DIR [VERSION]
# VERSION is 0.33.0 unless given; another one, such as a release candidate, is a trial. Takes 2 GB and some minutes. torch comes from wherever pip is told to look; a CPU build is enough.
set -eu

[ $# -ge 1 ] && [ $# -le 2 ] && [ -x "$1/bin/python" ] \
    || { echo "usage: install-official.sh VENV_DIR [VERSION], a virtual environment of Python 3.11"; exit 2; }
python="$1/bin/python"
version="${2:-0.33.0}"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || { echo "vllm $version was tried with Python 3.11 only; make the environment with it (ENGINE_PYTHON=python3.11)"; exit 1; }

# Without its dependencies, which ask for CUDA; what follows is what its scheduler imports.
pip install --no-deps "vllm==$version" || { echo "pip finds no wheel of vllm $version for this Python"; exit 1; }
pip install torch==2.13.0
pip install 'transformers>=5.16.1,<5.21' msgspec pydantic cachetools cloudpickle pyzmq psutil regex requests tqdm \
    prometheus_client numpy pillow py-cpuinfo pybase64 cbor2 gguf fastapi sentencepiece blake3 einops setproctitle openai \
    partial-json-parser python-json-logger pyyaml tiktoken aiohttp openai_harmony uvloop xgrammar llguidance
# What kvstore and its tests need, should the engine not have brought it.
pip install 'grpcio>=1.62.3' 'protobuf>=4.21.6,<8' 'xxhash>=3.2' pytest

# It warns that vllm._C is not there: that is the GPU's part.
"$python" -c 'import vllm.v1.core.sched.scheduler; print("vllm", vllm.__version__)' 2>/dev/null \
    || { echo "vLLM's scheduler does not import in $1; try: $python -c 'import vllm.v1.core.sched.scheduler'"; exit 1; }
