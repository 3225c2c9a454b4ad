# `make help` lists the targets. A target makes the environment that it needs. Tests that need an
# engine, another program or root are in tests/run.py: `make test-NAME` runs one of them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Four workers for each processor: most of the time they wait for deadlines and outages. The tests
# of a file share a node.
WORKERS ?= $(shell echo $$(($$(nproc) * 4)))
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# A test run starts hundreds of processes of the same files, so byte code is always cached.
export PYTHONDONTWRITEBYTECODE :=
# The commit's time instead of the build's makes a build reproducible.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1580601600)
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' kvstore/__init__.py)

.PHONY: help setup docs demo demo-cluster demo-operate test check lint types format proto golden bench dist release image docker-test gpu-test audit fuzz soak \
	soak-cluster rivals demo-vllm manifests clean

help:
	@echo "make setup        make the development environment, .venv; other targets do it when needed"
	@echo "make demo         load one process's KV in another, through a node (1 minute; MODEL=path, ARGS=--keep)"
	@echo "make demo-cluster kill, stop and add nodes of a cluster under load (1 minute; TRACE=path)"
	@echo "make demo-operate do a day's work at a cluster under load (3 minutes; etcd)"
	@echo "make test         run all tests that need no GPU, engine or Docker (ARGS goes to pytest)"
	@echo "make check        run what CI runs: format, lint, types, tests (parts: make lint, make types)"
	@echo "make docs         write the reference, check all links, and build the site in site/"
	@echo "make format       format the sources"
	@echo "make proto        generate the protobuf stubs after a change in proto/"
	@echo "make golden       record the stable names, flags, fields and metrics after some were added"
	@echo "make bench        measure wires, TLS, metadata and disk (15 minutes; 13 GiB of disk;"
	@echo "                  TRACE=path adds hit rates, DIR=path uses another disk)"
	@echo "make dist         build the wheel and the sources, the same bytes from every clone of a commit"
	@echo "make release      check and build a release; PUSH=1 pushes it (INDEX=, IMAGE=, CHARTS=)"
	@echo "make image        build the node's image, kvstore-node:VERSION (Docker; BASE=, SOURCE=)"
	@echo "make docker-test  test the image and the compose files (10 minutes; Docker, or root on Debian)"
	@echo "make clean        remove all environments and caches"
	@echo
	@$(PYTHON) tests/run.py --list

setup: $(READY)

# Environments. `make demo`, `make demo-cluster`, `make demo-operate` and `make dist` use the development environment if it
# exists, and otherwise make a smaller one.
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)
CLUSTER := $(if $(wildcard $(READY)),$(VENV),.venv-cluster)
BUILD := $(if $(wildcard $(READY)),$(VENV),.venv-build)
$(READY): packages = --editable '.[dev]'
.venv-demo/.ready: packages = --editable '.[node,cli,agent]' transformers
.venv-cluster/.ready: packages = --editable '.[node,cli]'
.venv-build/.ready: packages = hatchling
# torch of the public index brings gigabytes of CUDA to Linux. Without an NVIDIA GPU, PyTorch's index is
# tried first for a CPU build. An empty TORCH_INDEX= skips that.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(READY) .venv-demo/.ready: torch = $(TORCH_INDEX)
# pip shows its progress on a terminal, and only errors elsewhere.
QUIET = [ -t 1 ] && quiet= || quiet=--quiet
INSTALL = $(@D)/bin/python -m pip install $$quiet --disable-pip-version-check --constraint constraints.txt
# A demo imports a small part of torch and transformers; the rest is not compiled.
.venv-demo/.ready: INSTALL += --no-compile

$(READY) .venv-demo/.ready .venv-cluster/.ready .venv-build/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvstore needs Python 3.10 or newer; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(@D) || { echo "python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "making $(@D): pip install $(packages)"
	@$(if $(torch),$(QUIET); if [ $$(uname) = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		$(INSTALL) --no-deps --timeout 5 --retries 1 --index-url $(torch) torch || echo "$(torch) has no torch for this machine; asking the usual index"; fi)
	@$(QUIET); $(INSTALL) $(packages)
	@touch $@

demo: $(DEMO)/.ready
	$(DEMO)/bin/python benchmarks/demo.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

demo-cluster: $(CLUSTER)/.ready
	$(CLUSTER)/bin/python benchmarks/demo_cluster.py $(if $(TRACE),--trace $(TRACE)) $(ARGS)

demo-operate: $(CLUSTER)/.ready
	$(CLUSTER)/bin/python benchmarks/demo_operate.py $(if $(PICTURES),--pictures $(PICTURES)) $(ARGS)

# A user's PYTHONPATH must not change the tests; tests/helpers/hermetic.py removes other variables.
test: $(READY)
	env -u PYTHONPATH -u PYTHONOPTIMIZE $(PYTEST) $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	env -u PYTHONPATH -u PYTHONOPTIMIZE $(PYTEST)

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --pyi_out=. proto/kvstore/pb/kvstore.proto proto/node/pb/etcd.proto

# Record new names as stable. A removed name needs a line in docs/upgrading.md.
golden: $(READY)
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/helpers/record.py names

# The reference of flags, limits and metrics from the code, a check of all links, and the site in site/.
docs: $(READY)
	$(BIN)/python docs/make_reference.py
	$(PYTEST) tests/test_docs.py -k 'links or reference or files'
	test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install --quiet \
		--disable-pip-version-check 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=1,<2'; }
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

bench: $(READY)
	set -e; for name in bulk grpc_stream tls shm metadata; do $(BIN)/python benchmarks/$$name.py; done
	set -e; for name in disk disk_latency disk_ranges restart; do \
		$(BIN)/python benchmarks/$$name.py $(if $(DIR),--dir $(DIR)); done
	$(if $(TRACE),$(BIN)/python benchmarks/eviction.py $(TRACE) && $(BIN)/python benchmarks/disk_replay.py $(if $(DIR),--dir $(DIR)) $(TRACE))

# The wheel, for every environment that is not a clone of this repository, and the sources: dist/kvstore_llm-*.
dist: $(BUILD)/.ready
	rm -rf dist
	$(BUILD)/bin/python -m hatchling build --directory dist >/dev/null
	@cd dist && sha256sum kvstore_llm-*

# Everything but the pushes; PUSH=1 pushes to INDEX, IMAGE and CHARTS (deploy/release.py has the credentials).
release: $(BUILD)/.ready
	$(BUILD)/bin/python deploy/release.py $(VERSION) $(if $(PUSH),--push) $(ARGS)

# SOURCE is the repository's public address. BASE with a digest fixes the base image.
image:
	DOCKER_BUILDKIT=1 docker build --file docker/node.Dockerfile --tag kvstore-node:$(VERSION) $(if $(BASE),--build-arg BASE=$(BASE)) \
		--build-arg SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$(shell git describe --always --dirty --abbrev=40 --match=) --build-arg SOURCE=$(SOURCE) $(ARGS) .

docker-test: $(READY)
	KVSTORE=$(BIN)/kvstore tests/docker/test.sh

# tests/run.py knows the names, what each needs and which variables it reads. PYTHON runs the tests on a GPU.
test-% gpu-test-%:
	@$(PYTHON) tests/run.py $@

gpu-test audit fuzz soak soak-cluster rivals demo-vllm manifests:
	@$(PYTHON) tests/run.py $@

clean:
	rm -rf $(VENV) .venv-* .fuzz .mypy_cache .ruff_cache .pytest_cache
