#!/usr/bin/env bash
# Fills an environment with LightLLM's CPU and disk cache: its sources, and what that part of them imports.
#
#     bash tests/engines/lightllm/install.sh VENV_DIR
#
# LightLLM is on no package index. LIGHTLLM_SRC names a checkout to use; without it the commit below is
# fetched into the environment. The checkout is put on the environment's path, not installed: its requirements
# are those of a GPU server. LightMem must not be there: our `light_mem` takes its place.
set -eu

venv=${1:?usage: install.sh VENV_DIR}
commit=87881ae7
python=$venv/bin/python
source=${LIGHTLLM_SRC:-$venv/src/LightLLM}

"$python" -m pip install --quiet --disable-pip-version-check \
    'torch==2.13.0' triton numpy xxhash easydict atomics cffi tqdm filelock psutil \
    uvloop setproctitle pyzmq 'grpcio>=1.62.3' 'protobuf>=4.21.6,<8' pytest

if [ ! -d "$source/lightllm" ]; then
    if [ -n "${LIGHTLLM_SRC:-}" ]; then
        echo "LIGHTLLM_SRC=$source holds no folder lightllm" >&2
        exit 1
    fi
    command -v git >/dev/null || { echo "needs git, or LIGHTLLM_SRC=<a checkout of LightLLM>" >&2; exit 1; }
    git clone --quiet --filter=blob:none --no-checkout https://github.com/ModelTC/LightLLM "$source" || {
        echo "could not clone LightLLM; set LIGHTLLM_SRC=<a checkout at $commit>" >&2
        exit 1
    }
    git -C "$source" checkout --quiet "$commit"
fi

"$python" - "$(cd "$source" && pwd)" <<'PYTHON'
import importlib.util
import pathlib
import sys
import sysconfig

path = pathlib.Path(sysconfig.get_path("purelib"))
(path / "lightllm-source.pth").write_text(sys.argv[1] + "\n")
if importlib.util.find_spec("light_mem"):
    sys.exit("light_mem is installed here; uninstall it (pip uninstall light_mem): kvstore takes its place")
PYTHON
