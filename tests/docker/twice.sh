#!/usr/bin/env bash
# Builds the node's image twice, without cache, and compares what is in it: names, modes, owners, times and contents of all
# files, and the labels. `make test-image` runs it; BASE, CACHE, PIP_CERT, DEBIAN_MIRROR as for tests/docker/test.sh. Leaves behind
# what apt-get installed, CACHE and, in a Docker that was there, the images that it pulled and the build cache.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec </dev/null

WORK=$(mktemp -d /var/tmp/kvstore-test-image.XXXXXX)
IMAGE=kvstore-node:twice-$$
BASE=${BASE:-python:3.11-slim-bookworm}
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore-docker-test}
PYTHON=${PYTHON:-python3}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1580601600}
DOCKER=""

step() { printf 'test-image %4ds  %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'test-image: %s\n' "$*" >&2
    exit 1
}

# shellcheck source=tests/docker/daemon.sh
. tests/docker/daemon.sh

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    [[ -z $DOCKER ]] || "$DOCKER" image rm --force "$IMAGE-1" "$IMAGE-2" "$IMAGE-base" >/dev/null 2>&1 || true
    daemon_stop
    # Never delete through a mount that a daemon may have left behind.
    if grep -q " $WORK/" /proc/mounts 2>/dev/null; then
        echo "test-image: there are mounts below $WORK; it stays" >&2
    else
        rm -rf "$WORK"
    fi
    exit "$status"
}

# build NUMBER UMASK: from a copy of the sources of its own, made now and under this umask
build() {
    local source=$WORK/source-$1 secret=()
    [[ -z ${PIP_CERT:-} ]] || secret=(--secret "id=ca,src=$PIP_CERT")
    (umask "$2" && mkdir "$source" && tar -c --exclude=__pycache__ .dockerignore pyproject.toml constraints.txt README.md LICENSE kvstore node \
        gpu_agent docker | tar -x --no-same-permissions --touch -C "$source")
    DOCKER_BUILDKIT=1 "$DOCKER" build --no-cache ${BUILD_FLAGS[@]+"${BUILD_FLAGS[@]}"} ${secret[@]+"${secret[@]}"} \
        --build-arg "BASE=$base" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" --file "$source/docker/node.Dockerfile" \
        --tag "$IMAGE-$1" "$source" >"$WORK/build.log" 2>&1 || fail "the image does not build: $(tail -n 25 "$WORK/build.log")"
    "$DOCKER" save --output "$WORK/$1.tar" "$IMAGE-$1"
    step "built, umask $2: $("$DOCKER" image inspect --format '{{.Id}}' "$IMAGE-$1")"
}

trap clean_up EXIT
trap 'exit 130' INT TERM
daemon_find
base=$(daemon_image "$BASE" "$IMAGE-base")
step "Docker $("$DOCKER" version --format '{{.Server.Version}}'), building on $base"
build 1 022
build 2 077
label=$("$DOCKER" image inspect --format '{{index .Config.Labels "org.opencontainers.image.version"}}' "$IMAGE-2")
said=$("$DOCKER" run --rm --network none --read-only "$IMAGE-2" --version)
[[ $said == "$label" ]] || fail "the node says that it is $said, the image's label $label"
step "the node is $said, as the image's label says"
"$PYTHON" tests/docker/same.py "$WORK/1.tar" "$WORK/2.tar"
