#!/usr/bin/env bash
# Fills a virtual environment with SGLang 0.5.23 without its CUDA packages, about 2.5 GB:
#   install.sh VENV_DIR
# SGLang compiles its page hash at first use. That needs g++ and the headers of OpenSSL and of this Python.
set -eu

venv=${1:?usage: install.sh VENV_DIR}
python=$venv/bin/python

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "SGLang's tests need Python 3.11" >&2; exit 1; }
missing=
command -v g++ >/dev/null || missing="$missing g++"
echo '#include <openssl/sha.h>' | g++ -E -x c++ - >/dev/null 2>&1 || missing="$missing libssl-dev"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -f "$headers/Python.h" ] || missing="$missing python3.11-dev"
if [ -n "$missing" ]; then
    echo "SGLang's hash can not be built; missing:$missing" >&2
    exit 1
fi

pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip torch==2.13.0 numpy
pip --no-deps sglang==0.5.23
# What its pools and controllers import. Versions as they worked; torchvision is a stub of ours (stubs/).
pip ninja triton==3.9.0 apache-tvm-ffi transformers==5.19.0 compressed-tensors orjson psutil pybase64 requests pillow \
    starlette msgspec pydantic pyzmq tqdm ipython aiohttp dill gguf sentencepiece partial-json-parser openai setuptools
pip grpcio 'protobuf<8' xxhash prometheus-client pytest
