# An engine's image with the agent, for vLLM, SGLang, LightLLM and LMCache. Build from the
# repository's root, with BuildKit:
#
#   DOCKER_BUILDKIT=1 docker build -f docker/agent.Dockerfile \
#       --build-arg ENGINE_IMAGE=vllm/vllm-openai:v0.33.0 --build-arg EXTRA=cuda13 -t vllm-kvstore .
#
# EXTRA is cuda12 or cuda13, like the engine's torch (it adds CuPy), and empty for an engine that
# moves no pages on a GPU. The build changes no package of the engine: it fails and names the
# packages that would change (docker/add_agent.py).
#
# PYTHON         the engine's Python, if it is not `python3`: /opt/venv/bin/python
# ENGINE_USER    the user of the image, if it is not root
# BASE           the image that builds the wheel: any Python >= 3.10 with pip
# --secret id=ca,src=/path/to/bundle.crt    a package index behind a private CA
ARG BASE=python:3.11-slim-bookworm
ARG ENGINE_IMAGE

FROM ${BASE} AS wheel
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kvstore kvstore
COPY node node
COPY gpu_agent gpu_agent
RUN --mount=type=secret,id=ca,target=/run/secrets/ca.crt --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi \
    && python3 -m pip --disable-pip-version-check wheel --no-deps --wheel-dir /wheels .

FROM ${ENGINE_IMAGE}
ARG PYTHON=python3
ARG EXTRA=""
ARG ENGINE_USER=root
USER root
RUN --mount=type=bind,from=wheel,source=/wheels,target=/run/kvstore-wheels \
    --mount=type=bind,source=docker/add_agent.py,target=/run/add_agent.py \
    --mount=type=secret,id=ca,target=/run/secrets/ca.crt --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi \
    && ${PYTHON} /run/add_agent.py /run/kvstore-wheels ${EXTRA}
USER ${ENGINE_USER}
