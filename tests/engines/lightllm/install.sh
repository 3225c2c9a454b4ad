#!/usr/bin/env bash
# Fills an environment with LightLLM's CPU and disk cache: its sources, and what that part of them imports.
#
#     bash tests/engines/lightllm/install.sh VENV_DIR
#
# LightLLM is on no package index. LIGHTLLM_SRC names a checkout to use; without it the commit below is
# fetched into the environment. The checkout is put on the environment's path, not installed: its requirements
# are those of a GPU server, of which the packages that this part imports come here (2 GB). LightMem must not be
# there: our `light_mem` takes its place.
set -eu

venv=${1:?usage: install.sh VENV_DIR}
commit=87881ae7ca9aa774db744ad38df22c95d80c0eb0
python=$venv/bin/python
source=${LIGHTLLM_SRC:-$venv/src/LightLLM}
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install torch==2.13.0
# In the versions of LightLLM's requirements.txt, so that its modules load as they do in its servers.
pip install transformers==5.8.0 tokenizers==0.22.1 fastapi==0.115.6 pydantic==2.10.3 librosa==0.11.0 Pillow==10.4.0 \
    requests==2.31.0 httpx==0.28.1 sortedcontainers==2.4.0 numpy==2.1.3 easydict==1.13 atomics==1.0.3 filelock==3.17.0 \
    setproctitle==1.3.6 cffi tqdm psutil uvloop pyzmq triton
# What kvstore and its tests need.
pip install 'grpcio>=1.62.3' 'protobuf>=4.21.6,<8' xxhash pytest

if [ ! -d "$source/lightllm" ]; then
    if [ -n "${LIGHTLLM_SRC:-}" ]; then
        echo "LIGHTLLM_SRC=$source holds no folder lightllm" >&2
        exit 1
    fi
    command -v git >/dev/null || { echo "needs git, or LIGHTLLM_SRC=<a checkout of LightLLM>" >&2; exit 1; }
    rm -rf "$source" # of a try that was cut short
    git clone --quiet --filter=blob:none --no-checkout https://github.com/ModelTC/LightLLM "$source" || {
        echo "could not clone LightLLM; set LIGHTLLM_SRC=<a checkout at $commit>" >&2
        exit 1
    }
    git -C "$source" checkout --quiet "$commit"
fi
[ "$(git -C "$source" rev-parse HEAD 2>/dev/null)" = "$commit" ] ||
    echo "note: $source is not known to be at $commit, the commit that was tried" >&2

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

# All that the tests import, without a stand-in.
for module in multi_level_kv_cache.cpu_cache_client multi_level_kv_cache.manager multimodal_params core.objs.io_objs; do
    "$python" -c "import lightllm.server.$module" >/dev/null 2>&1 || {
        echo "a module of LightLLM does not import in $venv; try: $python -c 'import lightllm.server.$module'" >&2
        exit 1
    }
done
