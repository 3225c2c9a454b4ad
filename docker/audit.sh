#!/usr/bin/env bash
# Installs the packages of the node's image and the tools that look at them, for `make audit`, and runs docker/audit.py.
set -euo pipefail
cd "$(dirname "$0")/.."

"$PYTHON" -m venv --clear --without-pip .venv-image
"$PYTHON" -m venv .venv-audit
pip() { .venv-audit/bin/python -m pip "$@" --quiet --disable-pip-version-check; }
pip install --constraint constraints.txt pip-audit cyclonedx-bom
pip --python .venv-image/bin/python install --only-binary :all: --require-hashes --requirement docker/requirements.txt
pip --python .venv-image/bin/python install --no-deps --no-index dist/*.whl
# It would put the build path into the list of packages
rm -f .venv-image/lib/python*/site-packages/kvstore_llm-*.dist-info/direct_url.json
.venv-audit/bin/python docker/audit.py .venv-image/bin/python dist/sbom.json constraints.txt
