#!/usr/bin/env bash
# Installs atheris for `make fuzz` into the environment of the Python $1.
set -euo pipefail

if "$1" -c "import atheris" 2>/dev/null; then exit; fi
"$1" -m pip install --quiet --disable-pip-version-check --only-binary :all: --constraint constraints.txt atheris && exit
echo "needs atheris, which has wheels for Linux on x86-64 and Python 3.11 to 3.14; 'make test' has a short run without it" >&2
exit 1
