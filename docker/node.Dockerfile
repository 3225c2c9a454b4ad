# A storage node. Build from the repository's root; needs BuildKit, which Docker before 23 must be told:
#
#   DOCKER_BUILDKIT=1 docker build -f docker/node.Dockerfile -t kvstore-node .
#
# `make image` does the same with the version as its tag, and labels that say from which commit it was made.
# SOURCE_DATE_EPOCH, VERSION, REVISION, SOURCE are its arguments; two builds on one base are the same files (docs/upgrading.md).
#
# Another base with Python and pip, for which docker/requirements.txt has packages (its head says which):
#                                           --build-arg BASE=registry.example/python:3.11
# The same base for ever, by its digest:     --build-arg BASE=python:3.11-slim-bookworm@sha256:...
# A package index behind a private CA:       --secret id=ca,src=/path/to/bundle.crt
#
# Run it with docker/compose.yaml, which secures it, or by hand. By itself a node listens on its container's own loopback,
# where only `docker exec` and who shares its network reach it. Others do with TLS and identities, which first_start.py
# makes, for HOST, by which they call the node. Settings of both are variables: the health check does not see flags.
#
#   docker run --rm --network none -v kvstore_secrets:/secrets --entrypoint python kvstore-node \
#       /opt/kvstore/first_start.py /secrets HOST
#   docker run -d --name kvstore-node --read-only --memory 4g --stop-timeout 30 \
#       -p 7440-7442:7440-7442 -v kvstore-data:/data -v kvstore_socket:/run/kvstore -v kvstore_secrets:/secrets \
#       -e KVSTORE_NODE_HOST=0.0.0.0 -e KVSTORE_NODE_IDENTITIES=/secrets/identities \
#       -e KVSTORE_NODE_TLS_CERT=/secrets/node.pem -e KVSTORE_NODE_TLS_KEY=/secrets/node.key \
#       -e KVSTORE_NODE_TLS_CLIENT_CA=/secrets/ca.pem \
#       -e KVSTORE_TLS_CERT=/secrets/node.pem -e KVSTORE_TLS_KEY=/secrets/node.key \
#       -e KVSTORE_TLS_CA=/secrets/ca.pem -e KVSTORE_TOKEN_FILE=/secrets/operator.token \
#       kvstore-node --ram-bytes 2GiB --data-dir /data --disk-bytes 100GiB --shm-socket /run/kvstore/node.sock
#
# The last four variables are for `docker exec kvstore-node kvstore status`. In place of all of them and of the volume
# `-e KVSTORE_NODE_HOST=0.0.0.0 -e KVSTORE_NODE_INSECURE=1` lets everybody who reaches the ports do everything.
#
# Without --data-dir it is a node with RAM only, and /data stays empty. Without --shm-socket nobody shares its memory:
# other containers on this host take TCP, as they do at a node with identities that trusts no tenant with its memory
# (KVSTORE_NODE_SHM_TRUST). How they share it: docs/operations.md.
#
# Memory: pages live in an anonymous shared-memory file (memfd), all of it touched at the start. The
# size of /dev/shm does not bound it, so --shm-size is not needed; the container's memory limit does.
# Give it ram_nbytes + ram_nbytes/64 + 512 MiB + 384 MiB for each gateway process; the arithmetic is in
# docker/compose.yaml. The node is process 1 and reaps its children itself, the gateways and the disk I/O process:
# each has a thread that waits for it, and none has children of its own.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Of all files of the image. The order of sets in byte code hangs on the seed.
ARG SOURCE_DATE_EPOCH=1580601600
ENV PYTHONHASHSEED=0
WORKDIR /src
COPY pyproject.toml README.md LICENSE docker/requirements.txt docker/build-requirements.txt ./
COPY kvstore kvstore
COPY node node
COPY gpu_agent gpu_agent
# pip installs into the environment from outside, so that the image gets no second pip. It takes no file from the index
# whose hash is not listed, neither for the image nor for the build. The CA is a secret and not an argument: nothing of it
# stays in a layer.
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
# A number, so that Kubernetes' runAsNonRoot can tell that it is not root. A new named volume takes
# owner and mode of its directory from here; a bind mount must be given to this user by hand. Others may look
# into /run/kvstore, or they would be told that there is no socket; the socket itself lets nobody else in.
# /prometheus and /grafana are first_scrape.py's.
RUN install -m 0644 first_start.py first_scrape.py health.py /opt/kvstore \
    && install -d -o 10001 -g 10001 -m 0750 /runtime/data /runtime/secrets /runtime/prometheus /runtime/grafana \
    && install -d -o 10001 -g 10001 -m 0755 /runtime/run/kvstore \
    && python3 runtime.py /opt/kvstore /runtime

# Python and the node: no shell, no package manager, no pip. `docker exec NODE kvstore status` needs none.
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
# The root may be read-only: the node writes nothing outside /data and the socket's volume, and Python
# no byte code.
ENV PATH=/opt/kvstore/bin PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /data
VOLUME /data
# gRPC, bulk TCP, Prometheus metrics
EXPOSE 7440 7441 7442
# The start period is what touching a large RAM tier may take: 1 s per 2 GiB, and 20 times that where
# a hypervisor finds the memory only then. It delays nothing: the first check that succeeds ends it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["/opt/kvstore/bin/python", "/opt/kvstore/health.py"]
# Exec form: the node is process 1 and gets SIGTERM itself, which drains it.
ENTRYPOINT ["/opt/kvstore/bin/kvstore-node"]
