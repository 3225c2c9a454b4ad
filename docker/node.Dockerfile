# A storage node. Build from the repository's root, with BuildKit (Docker before 23 needs the
# variable):
#
#   DOCKER_BUILDKIT=1 docker build -f docker/node.Dockerfile -t kvstore-node .
#
# `make image` does the same, with the version as the tag and labels with the commit. Its arguments
# are SOURCE_DATE_EPOCH, VERSION, REVISION and SOURCE. Two builds on one base have the same files
# (docs/upgrading.md).
#
# Another base with Python and pip, for which docker/requirements.txt has packages (see its head):
#                                           --build-arg BASE=registry.example/python:3.11
# A fixed base, by its digest:              --build-arg BASE=python:3.11-slim-bookworm@sha256:...
# A package index behind a private CA:      --secret id=ca,src=/path/to/bundle.crt
#
# Run it with docker/compose.yaml, which secures it, or by hand. By default a node listens on its
# container's loopback, which only `docker exec` and containers in the same network namespace reach.
# Other clients need TLS and identities. first_start.py makes them for HOST, the name in the node's
# address. Settings of both are variables, because the health check does not see flags.
#
#   docker run --rm --network none -v kvstore_secrets:/secrets --entrypoint python kvstore-node \
#       /opt/kvstore/first_start.py /secrets HOST
#   docker run -d --name kvstore-node --read-only --memory 4g --stop-timeout 30 \
#       -p 7440-7442:7440-7442 -v kvstore-data:/data -v kvstore_socket:/run/kvstore \
#       -v kvstore_secrets:/secrets \
#       -e KVSTORE_NODE_HOST=0.0.0.0 -e KVSTORE_NODE_IDENTITIES=/secrets/identities \
#       -e KVSTORE_NODE_TLS_CERT=/secrets/node.pem -e KVSTORE_NODE_TLS_KEY=/secrets/node.key \
#       -e KVSTORE_NODE_TLS_CLIENT_CA=/secrets/ca.pem \
#       -e KVSTORE_TLS_CERT=/secrets/node.pem -e KVSTORE_TLS_KEY=/secrets/node.key \
#       -e KVSTORE_TLS_CA=/secrets/ca.pem -e KVSTORE_TOKEN_FILE=/secrets/operator.token \
#       kvstore-node --ram-bytes 2GiB --data-dir /data --disk-bytes 100GiB \
#       --shm-socket /run/kvstore/node.sock
#
# The last four variables are for `docker exec kvstore-node kvstore status`. Without authentication,
# `-e KVSTORE_NODE_HOST=0.0.0.0 -e KVSTORE_NODE_INSECURE=1` replaces all of them and the volume, and
# lets anyone who reaches the ports do everything.
#
# Without --data-dir the node has RAM only, and /data stays empty. Without --shm-socket it shares no
# memory: other containers on this host use TCP, as they do at a node with identities that trusts no
# tenant with its memory (KVSTORE_NODE_SHM_TRUST). docs/operations.md shows how to share it.
#
# Memory: pages are in an anonymous shared-memory file (memfd), which the node touches at its start.
# The container's memory limit bounds it; --shm-size does not. The limit must be ram_nbytes +
# ram_nbytes/64 + 512 MiB + 384 MiB for each gateway process (docker/compose.yaml explains the
# terms). The node is process 1 and reaps its children, the gateways and the disk I/O process: a
# thread waits for each of them, and none has children of its own.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Time of all files of the image. The order of sets in byte code depends on the hash seed.
ARG SOURCE_DATE_EPOCH=1580601600
ENV PYTHONHASHSEED=0
WORKDIR /src
COPY pyproject.toml README.md LICENSE docker/requirements.txt docker/build-requirements.txt ./
COPY kvstore kvstore
COPY node node
COPY gpu_agent gpu_agent
# pip installs into the environment from outside, so that the image gets no second pip. It installs
# only files with listed hashes, for the image and for the build. The CA is a secret, not an
# argument, so no layer has it.
RUN --mount=type=secret,id=ca,target=/run/secrets/ca.crt --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi \
    && python3 -m venv --without-pip /opt/kvstore \
    && python3 -m venv --without-pip /build \
    && export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all: \
    && python3 -m pip --python /build/bin/python install --require-hashes -r build-requirements.txt \
    && /build/bin/python -m hatchling build --target wheel --directory /wheels \
    && python3 -m pip --python /opt/kvstore/bin/python install --no-compile --require-hashes -r requirements.txt \
    && python3 -m pip --python /opt/kvstore/bin/python install --no-compile --no-deps --no-index /wheels/*.whl
COPY docker/first_start.py docker/first_scrape.py docker/health.py docker/runtime.py ./
# The user is a number, so that Kubernetes' runAsNonRoot can check it. A new named volume takes
# owner and mode of its directory from here; a bind mount needs `chown`. Other users may list
# /run/kvstore, to find the socket; the socket's own mode admits this user only. first_scrape.py
# uses /prometheus and /grafana.
RUN install -m 0644 first_start.py first_scrape.py health.py /opt/kvstore \
    && install -d -o 10001 -g 10001 -m 0750 /runtime/data /runtime/secrets /runtime/prometheus /runtime/grafana \
    && install -d -o 10001 -g 10001 -m 0755 /runtime/run/kvstore \
    && python3 runtime.py /opt/kvstore /runtime

# Python and the node: no shell, no package manager, no pip. `docker exec NODE kvstore status`
# works.
FROM scratch
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title=kvstore-node \
    org.opencontainers.image.version=${VERSION} \
    org.opencontainers.image.revision=${REVISION} \
    org.opencontainers.image.source=${SOURCE} \
    org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /runtime /
# The root file system may be read-only: the node writes only to /data and the socket's volume.
ENV PATH=/opt/kvstore/bin PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /data
VOLUME /data
# gRPC, bulk TCP, Prometheus metrics
EXPOSE 7440 7441 7442
# The start period allows for touching a large RAM tier: 1 s for 2 GiB, 20 times that where a
# hypervisor allocates memory on the first touch. The first successful check ends it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["/opt/kvstore/bin/python", "/opt/kvstore/health.py"]
# Exec form: the node is process 1 and gets SIGTERM, which drains it.
ENTRYPOINT ["/opt/kvstore/bin/kvstore-node"]
