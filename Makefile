# make help tells what there is. Set-up happens by itself, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

CYCLES ?= 300
RUNS ?= 50
LIVES ?= 300
INPUTS ?= 1000000
# Bytecode is kept, whatever the environment says: a test run starts hundreds of processes of the same few files.
export PYTHONDONTWRITEBYTECODE :=
# A file's tests stay together in one worker: they share their node. Half of the time they wait, for deadlines and
# outages: twice as many workers as processors.
WORKERS ?= $(shell echo $$(($$(nproc) * 2)))
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo demo-cluster test test-hostile test-etcd test-tls test-cluster test-races test-crash test-power test-protobuf test-otlp test-transformers test-clients fuzz audit dist test-dist image test-image docker-test test-kubernetes test-monitoring test-console gpu-test gpu-test-vllm gpu-test-sglang test-vllm test-vllm-scheduler test-sglang test-lightllm test-lmcache demo-vllm check format lint types proto golden bench soak soak-cluster clean

help:
	@echo "make demo         KV of one process loaded by another through a real node (about a minute)"
	@echo "make demo-cluster three nodes as one store: one is killed, one stopped, one joins under load, and nobody notices (a minute; TRACE=path)"
	@echo "make demo-vllm    real vLLM on this CPU: the second server answers from the first one's KV (2 minutes; installs 3.4 GB)"
	@echo "make test         all tests: no GPU, engine or Docker needed"
	@echo "make test-hostile all tests, with a hostile HOME, pip, git, locale, terminal and umask (UMASK=000 for another)"
	@echo "make test-etcd    nodes that register themselves in a real etcd, which is killed, paused and wiped (1 minute; etcd)"
	@echo "make test-tls     tests of nodes that know nothing of TLS, all of it over TLS (2 minutes)"
	@echo "make test-races   300 lives of the RAM tier, its users interleaved at random (1-2 minutes); LIVES=60 for less"
	@echo "make test-crash   kills a node 300 times under load and checks every page (6 minutes); CYCLES=20 for less"
	@echo "make test-power   loses power at 5,000 moments of what a node does to its disk (3 minutes); RUNS=5 for less"
	@echo "make fuzz         $(INPUTS) inputs, guided by coverage, for all parsers of bytes from outside (some 10 minutes; atheris);"
	@echo "                  INPUTS=10000 for fewer, TARGET=bulk for one of them"
	@echo "make audit        what the node's image installs, its licences, dist/sbom.json, and what is known against it (network;"
	@echo "                  status 3: nobody could be asked)"
	@echo "make test-protobuf  the service under the oldest and newest protobuf of our range (3 minutes)"
	@echo "make test-transformers  the adapters of transformers with 5.24, after the 5.23 of make test (2 minutes)"
	@echo "make test-otlp    traces by OpenTelemetry's own exporters, over HTTP and gRPC, to a collector that takes, refuses or hangs (3 minutes; network)"
	@echo "make test-clients  the client in docs/clients (Node.js, npm) against a node and the golden bytes"
	@echo "make test-cluster   nodes on hosts of their own (network namespaces) that are killed, stopped, cut off, full, with etcd and without (8 minutes; root, Linux)"
	@echo "make dist         the wheel and the sources, the same bytes from every clone of a commit; make test-dist tries them"
	@echo "make image        the node's image, kvstore-node:VERSION, labelled with its commit (Docker; BASE=, SOURCE=)"
	@echo "make test-image   builds the image twice without cache and compares all files (3 minutes; Docker, or root on Debian)"
	@echo "make docker-test  builds the image, runs it, kills it, reads its pages back; one node, and three as one store, Prometheus beside them (some 10 minutes; Docker, or root on Debian)"
	@echo "make test-kubernetes  renders deploy/kubernetes and holds it against the API's schemas (half a minute; kubectl, network the first time)"
	@echo "make test-monitoring  alerts and dashboard: by promtool, and each panel's query asked of a real Prometheus that scrapes three nodes (half a minute; Debian's prometheus)"
	@echo "make test-console the page for browsers, in a headless Chromium (half a minute; Chromium); PICTURES=docs/pictures makes its pictures"
	@echo "make test-vllm | test-sglang | test-lightllm | test-lmcache"
	@echo "                  the engines' own code, each in an environment of its own (Python 3.11, 1.5 to 5 GB; no GPU);"
	@echo "                  LightLLM is cloned with git, or LIGHTLLM_SRC names a checkout; ARGS goes to pytest"
	@echo "                  SEEDS=200: so many storms through an engine's scheduler"
	@echo "                  test-lmcache: 0.5.6 and 0.5.7rc2, LMCACHE_VERSIONS=0.5.6 for one; 5 GiB of free memory"
	@echo "make gpu-test     kernels against the reference on this machine's GPU, memcheck, GPU benchmarks (5 minutes; NVIDIA GPU, CuPy)"
	@echo "make gpu-test-vllm  real vLLM on this machine's GPU: hits, caches, outages, its server, both routes (6 minutes;"
	@echo "                  PYTHON names one with vLLM 0.33, CuPy, pytest, pytest-xdist and '.[node]'; two ranks need two GPUs)"
	@echo "make gpu-test-sglang  real SGLang on this machine's GPU: HiCache and the linker, layouts, outages, ends (2 minutes;"
	@echo "                  PYTHON names one with SGLang 0.5.23, CuPy, pytest, pytest-xdist and '.[node]')"
	@echo "make check        what CI runs: format, lint, types, tests"
	@echo "make soak         a node's private memory while namespaces come and go (2 minutes; ARGS=--disk, --evict, --rounds)"
	@echo "make soak-cluster three nodes under mixed load and faults: what must stay flat, as a picture (30 minutes; ARGS='--minutes 5')"
	@echo "make bench        ten benchmarks, of the wires, TLS, lookups, metadata and the disk; TRACE=path adds two of hit rates, DIR=path"
	@echo "                  puts the data on another disk; not those of locks, calls abreast, GPUs (make gpu-test) and engines"
	@echo "                  (15 minutes; leave the machine idle, have redis-server installed and 13 GiB of disk free)"
	@echo "make proto        regenerate the protobuf stubs after a change in proto/"
	@echo "make golden       records the names, flags, fields and metrics that are promised, after some were added"
	@echo "make format       rewrite the sources in the project's format"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvstore needs Python 3.10 or newer; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python benchmarks/demo.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

demo-cluster: $(READY)
	$(BIN)/python benchmarks/demo_cluster.py $(if $(TRACE),--trace $(TRACE)) $(ARGS)

# A user's PYTHONPATH is none of the tests' business; targets that need one set it themselves. What else a user may have
# set, tests/common/hermetic.py keeps off.
test: $(READY)
	env -u PYTHONPATH -u PYTHONOPTIMIZE $(PYTEST) $(ARGS)

# All tests where pip, git, locale, terminal, settings, HOME and umask are as unlike ours as they may be.
UMASK ?= 077
test-hostile: $(READY)
	$(BIN)/python tests/common/hostile.py --umask $(UMASK) $(wordlist 4,99,$(PYTEST)) $(if $(ARGS),$(ARGS),$(CURDIR)/tests)

# Of what is built: when it was last changed, not when it is built.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1580601600)
export SOURCE_DATE_EPOCH
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' kvstore/__init__.py)

# The wheel, for every environment that is not a clone of this repository, and the sources: dist/kvstore_llm-*.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist >/dev/null
	@cd dist && sha256sum kvstore_llm-*

# As a stranger would: an empty environment, the wheel and what it asks the index for (torch as engines bring it). And
# from two clones the same bytes.
test-dist: dist
	rm -rf .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(ls dist/*.whl)[node,cli,agent]"
	KVSTORE_DIST_PYTHON=$(CURDIR)/.venv-dist/bin/python $(BIN)/python -m pytest tests/packaging

# SOURCE: where the repository is for others. BASE with its digest is the same base for ever.
image:
	DOCKER_BUILDKIT=1 docker build --file docker/node.Dockerfile --tag kvstore-node:$(VERSION) $(if $(BASE),--build-arg BASE=$(BASE)) \
		--build-arg SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$(shell git describe --always --dirty --abbrev=40 --match=) --build-arg SOURCE=$(SOURCE) $(ARGS) .

test-image: $(READY)
	PYTHON=$(BIN)/python tests/docker/twice.sh

test-etcd: $(READY)
	@command -v etcd >/dev/null && command -v etcdctl >/dev/null || { echo "needs etcd and etcdctl; on Debian: apt-get install etcd-server etcd-client"; exit 1; }
	$(BIN)/python -m pytest tests/etcd $(ARGS)

# Files whose nodes are in the tests' own process, and that do not write HTTP/2 by hand.
OVER_TLS := bulk_abuse bad_requests limits_requests limits_ranges limits_grpc cluster near broken_work storm hand_over grpc_abuse

test-tls: $(READY)
	PYTHONPATH=tests/common $(PYTEST) -p over_tls $(OVER_TLS:%=tests/node/test_%.py) $(ARGS)

test-races: $(READY)
	KVSTORE_RACES=$(LIVES) $(PYTEST) --dist load tests/node/test_interleaved.py

test-crash: $(READY)
	$(BIN)/python tests/disk/crash.py --cycles $(CYCLES) $(if $(DIR),--dir $(DIR))

test-power: $(READY)
	$(BIN)/python tests/disk/power.py --runs $(RUNS) $(if $(DIR),--dir $(DIR))

# One of every major that our range allows, the oldest and the newest among them, laid over our own environment.
test-protobuf: $(READY)
	@for version in 4.21.6 5.26.1 6.33.6 7.36.2; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-protobuf/$$version protobuf==$$version || exit 1; \
		echo "protobuf $$version"; \
		PYTHONPATH=.venv-protobuf/$$version $(BIN)/python -m pytest tests/node/test_service_surface.py tests/node/test_bad_requests.py \
			tests/node/test_grpc_abuse.py tests/node/test_limits_grpc.py tests/core/test_client.py tests/core/test_messages.py tests/cli/test_commands.py || exit 1; \
	done

# The release after the pinned one, laid over our own environment: it renamed the argument of a model's cache.
test-transformers: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-transformers/5.24.0 transformers==5.24.0
	PYTHONPATH=.venv-transformers/5.24.0 $(BIN)/python -m pytest tests/gpu_agent/test_transformers.py tests/gpu_agent/test_transformers_paged.py \
		tests/gpu_agent/test_tenants.py tests/gpu_agent/identity/test_rope.py $(ARGS)

# The last exporters that fit our pins, and today's with what they ask for, each in an environment of its own.
OTLP := opentelemetry-sdk opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-grpc
test-otlp:
	@for version in 1.27.0 1.45.2; do \
		$(PYTHON) -m venv .venv-otlp/$$version; \
		.venv-otlp/$$version/bin/python -m pip install --quiet --disable-pip-version-check '.[node]' cryptography pytest \
			$(addsuffix ==$$version,$(OTLP)) || exit 1; \
		echo "opentelemetry $$version"; \
		.venv-otlp/$$version/bin/python -m pytest tests/tracing $(ARGS) || exit 1; \
	done

# Guided by coverage. The same targets have a short run in `make test`, which needs no atheris.
fuzz: $(READY)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --constraint constraints.txt atheris || { echo "needs atheris, which has wheels for Linux on x86-64 and Python 3.11 to 3.14; 'make test' has a short run without it"; exit 1; }
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/fuzz/guided.py --inputs $(INPUTS) $(if $(TARGET),--target "$(TARGET)") $(ARGS)

# What the image gets, in an environment of its own, and the tools that look at it in another.
audit: dist
	@$(PYTHON) -m venv --clear --without-pip .venv-image && $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip-audit cyclonedx-bom
	$(BIN)/python -m pip --python .venv-image/bin/python install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement docker/requirements.txt
	$(BIN)/python -m pip --python .venv-image/bin/python install --quiet --disable-pip-version-check --no-deps --no-index dist/*.whl
	@rm -f .venv-image/lib/python*/site-packages/kvstore_llm-*.dist-info/direct_url.json  # where it was built is no part of it
	.venv-audit/bin/python docker/audit.py .venv-image/bin/python dist/sbom.json constraints.txt

test-clients: $(READY)
	@command -v npm >/dev/null || { echo "needs Node.js 18 or newer with npm"; exit 1; }
	cd docs/clients && npm install --no-audit --no-fund --no-package-lock
	$(BIN)/python -m pytest tests/clients

# Not of `make test`: it needs root, and minutes.
test-cluster: $(READY)
	KVSTORE_CLUSTER_FAULTS=1 $(BIN)/python -m pytest tests/cluster_faults $(ARGS)

docker-test: $(READY)
	KVSTORE=$(BIN)/kvstore tests/docker/test.sh

# The schemas of the API are a package of their own, in an environment of their own.
.venv-kubernetes/.ready: constraints.txt
	@$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt kubernetes-validate
	@touch $@

KUBECTL ?= kubectl
test-kubernetes: $(READY) .venv-kubernetes/.ready
	@command -v $(KUBECTL) >/dev/null || { echo "needs kubectl 1.20 or newer; on Debian: apt-get install kubernetes-client"; exit 1; }
	KUBECTL=$(KUBECTL) KVSTORE_KUBERNETES_VALIDATE=$(CURDIR)/.venv-kubernetes/bin/kubernetes-validate $(BIN)/python -m pytest tests/kubernetes $(ARGS)

PROMTOOL ?= promtool
PROMETHEUS ?= prometheus
test-monitoring: $(READY)
	@command -v $(PROMTOOL) >/dev/null && command -v $(PROMETHEUS) >/dev/null || { echo "needs prometheus and promtool; on Debian: apt-get install prometheus"; exit 1; }
	KVSTORE_PROMTOOL=$(PROMTOOL) KVSTORE_PROMETHEUS=$(PROMETHEUS) $(BIN)/python -m pytest tests/monitoring $(ARGS)

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
test-console: $(READY)
	@test -n "$(CHROMIUM)" || { echo "needs Chromium; on Debian: apt-get install chromium"; exit 1; }
	KVSTORE_CHROMIUM=$(CHROMIUM) $(if $(PICTURES),KVSTORE_PICTURES=$(CURDIR)/$(PICTURES)) $(BIN)/python -m pytest tests/console $(ARGS)

# Engines, each in an environment of its own that its install.sh fills (1.5 to 3.5 GB; Python 3.11). The node runs in ours.
ENGINE_PYTHON ?= python3.11

define engine_environment
	@command -v $(ENGINE_PYTHON) >/dev/null || { echo "the engines need Python 3.11; set ENGINE_PYTHON=..."; exit 1; }
	@$(ENGINE_PYTHON) -m venv $(@D)
	bash $< $(@D) $(engine_version)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
endef

.venv-%/.ready: tests/engines/%/install.sh pyproject.toml
	$(engine_environment)

.venv-lmcache-%/.ready: engine_version = $*
.venv-lmcache-%/.ready: tests/engines/lmcache/install.sh pyproject.toml
	$(engine_environment)

.venv-vllm-official/.ready: tests/engines/vllm/install-official.sh pyproject.toml
	$(engine_environment)

.PRECIOUS: .venv-%/.ready .venv-lmcache-%/.ready

test-vllm test-sglang test-lightllm: test-%: $(READY) .venv-%/.ready
	KVSTORE_NODE_PYTHON=$(BIN)/python .venv-$*/bin/python -m pytest tests/engines/$* $(ARGS)

# The release of which the documents speak, and the one that comes.
LMCACHE_VERSIONS ?= 0.5.6 0.5.7rc2
test-lmcache: $(LMCACHE_VERSIONS:%=test-lmcache-%)

test-lmcache-%: $(READY) .venv-lmcache-%/.ready
	KVSTORE_NODE_PYTHON=$(BIN)/python .venv-lmcache-$*/bin/python -m pytest tests/engines/lmcache $(ARGS)

# vLLM that runs on a CPU is a community build. The official wheel does not, but its scheduler does.
test-vllm: test-vllm-scheduler

test-vllm-scheduler: $(READY) .venv-vllm-official/.ready
	KVSTORE_NODE_PYTHON=$(BIN)/python .venv-vllm-official/bin/python -m pytest \
		$(wildcard tests/engines/vllm/test_tier*.py tests/engines/vllm/test_scheduler*.py) $(ARGS)

demo-vllm: $(READY) .venv-vllm/.ready
	KVSTORE_NODE_PYTHON=$(BIN)/python .venv-vllm/bin/python benchmarks/demo_vllm.py $(ARGS)

# On a machine whose python has torch for its GPU, CuPy, pytest and transformers; PYTHON names another one.
gpu-test:
	@$(PYTHON) -c 'import cupy, torch; assert torch.cuda.is_available()' || { echo "needs an NVIDIA GPU, torch with CUDA and CuPy (pip install '.[dev,cuda13]' or [dev,cuda12]) in $(PYTHON)"; exit 1; }
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu_agent
	@if command -v compute-sanitizer >/dev/null; then \
		PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 9 $(PYTHON) -m pytest tests/gpu_agent/test_kernels_cuda.py tests/gpu_agent/test_leaves_cuda.py; \
	else echo "compute-sanitizer (CUDA toolkit) is not here: no memcheck"; fi
	PYTHONPATH=. $(PYTHON) benchmarks/transfer.py
	PYTHONPATH=. $(PYTHON) benchmarks/agent.py
	@if $(PYTHON) -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then PYTHONPATH=. $(PYTHON) benchmarks/agents.py; fi
	PYTHONPATH=. $(PYTHON) benchmarks/ttft.py

# Engines of four files start side by side; each file has a node of its own.
gpu-test-vllm:
	@$(PYTHON) -c 'import cupy, torch, vllm, rocksdict, pytest, xdist; assert torch.cuda.is_available()' || { echo "needs an NVIDIA GPU, and in $(PYTHON): vllm==0.33.0, cupy-cuda12x or -13x as its torch, pytest, pytest-xdist, and this project ('.[node]')"; exit 1; }
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest -p no:benchmark --numprocesses 4 --dist loadfile tests/engines/vllm/gpu $(ARGS)

gpu-test-sglang:
	@$(PYTHON) -c 'import cupy, torch, sglang, rocksdict, pytest, xdist; assert torch.cuda.is_available()' || { echo "needs an NVIDIA GPU, and in $(PYTHON): sglang==0.5.23, cupy-cuda12x or -13x as its torch, pytest, pytest-xdist, and this project ('.[node]')"; exit 1; }
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest -p no:benchmark --numprocesses 4 --dist loadfile tests/engines/sglang/gpu $(ARGS)

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

# What is new is promised from now on; what is gone is not any more, which needs a line in docs/upgrading.md.
golden: $(READY)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/common $(BIN)/python tests/promises/record.py names

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --pyi_out=. proto/kvstore/pb/kvstore.proto proto/node/pb/etcd.proto

soak: $(READY)
	$(BIN)/python benchmarks/soak.py $(ARGS)

soak-cluster: $(READY)
	$(BIN)/python benchmarks/soak_cluster.py $(ARGS)

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'redis[hiredis]>=5'
	$(BIN)/python benchmarks/bulk.py
	$(BIN)/python benchmarks/grpc_stream.py
	$(BIN)/python benchmarks/tls.py
	$(BIN)/python benchmarks/shm.py
	$(BIN)/python benchmarks/lookup.py
	$(BIN)/python benchmarks/metadata.py
	$(BIN)/python benchmarks/disk.py $(if $(DIR),--dir $(DIR))
	$(BIN)/python benchmarks/disk_latency.py $(if $(DIR),--dir $(DIR))
	$(BIN)/python benchmarks/disk_ranges.py $(if $(DIR),--dir $(DIR))
	$(BIN)/python benchmarks/restart.py $(if $(DIR),--dir $(DIR))
	$(if $(TRACE),$(BIN)/python benchmarks/eviction.py $(TRACE))
	$(if $(TRACE),$(BIN)/python benchmarks/disk_replay.py $(if $(DIR),--dir $(DIR)) $(TRACE))

clean:
	rm -rf $(VENV) .venv-* .fuzz .mypy_cache .ruff_cache .pytest_cache
