#!/usr/bin/env bash
# Installs Dynamo's router and frontend, without what only its predictions need, into the environment $1.
set -euo pipefail

pip() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }
pip "$1" --no-deps --only-binary :all: ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
pip "$1" msgspec packaging prometheus-client pydantic==2.13.5 pyyaml uvloop
