#!/bin/bash
# LMCache (0.5.6, or VERSION) without a GPU into the environment VENV_DIR (1.6 GB, about two minutes; Python 3.11), and its source
# distribution beside it, for its tests. torch comes from wherever pip is told to look; a CPU build is enough.
#
#   tests/engines/lmcache/install.sh VENV_DIR [VERSION]
set -eu

[ $# -ge 1 ] && [ $# -le 2 ] && [ -x "$1/bin/python" ] || { echo "usage: $0 VENV_DIR [VERSION] (a virtual environment)" >&2; exit 2; }
venv=$1
version=${2:-0.5.6}
pip() { "$venv/bin/python" -m pip "$1" --quiet --disable-pip-version-check "${@:2}"; }

"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "LMCache $version was tried with Python 3.11; set ENGINE_PYTHON=python3.11" >&2
    exit 1
}
pip install torch==2.13.0 "numpy<=2.2.6" "setuptools<81" "setuptools_scm>=8"
# Without its dependencies, which ask for CUDA; what follows is what the CPU server, its bench and its tests import.
pip install --no-deps "lmcache==$version"
pip install numba msgspec pyzmq blake3 aiofiles aiofile sortedcontainers psutil py-cpuinfo pyyaml "prometheus_client<=0.24.1" \
    "opentelemetry-api<=1.40.0" "opentelemetry-exporter-prometheus<=0.61b0" opentelemetry-exporter-otlp fastapi uvicorn \
    httptools httpx aiohttp cachetools safetensors nvtx redis cryptography huggingface_hub "transformers>=5.4" \
    grpcio==1.78.0 "protobuf>=6.31.1,<7" xxhash pytest pytest-asyncio pytest-timeout
mkdir -p "$venv/lmcache_sdist"
[ -e "$venv/lmcache_sdist/lmcache-$version.tar.gz" ] || NO_NATIVE_EXT=1 pip download --dest "$venv/lmcache_sdist" \
    --no-deps --no-build-isolation --no-binary lmcache "lmcache==$version"
command -v redis-server >/dev/null || echo "redis-server is not here: benchmarks/lmcache_l2.py will leave its rows out (Debian: apt-get install redis-server)"
