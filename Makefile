# make help tells what there is. Set-up happens by itself, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test check format lint types proto bench clean

help:
	@echo "make demo     KV of one process loaded by another through a real node (about a minute)"
	@echo "make test     all tests: no GPU, engine or Docker needed"
	@echo "make check    what CI runs: format, lint, types, tests"
	@echo "make bench    all benchmarks; TRACE=path adds the hit-rate one (5 minutes; leave the machine idle, have redis-server installed)"
	@echo "make proto    regenerate the protobuf stubs after a change in proto/"
	@echo "make format   rewrite the sources in the project's format"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvstore needs Python 3.10 or newer; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python benchmarks/demo.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --pyi_out=. proto/kvstore/pb/kvstore.proto

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'redis[hiredis]>=5'
	$(BIN)/python benchmarks/bulk.py
	$(BIN)/python benchmarks/lookup.py
	$(BIN)/python benchmarks/metadata.py
	$(if $(TRACE),$(BIN)/python benchmarks/eviction.py $(TRACE))

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
