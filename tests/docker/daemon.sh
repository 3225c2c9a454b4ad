# shellcheck shell=bash disable=SC2034  # COMPOSE and BUILD_FLAGS are the caller's
# Finds a Docker for tests/docker/test.sh, or starts one of its own. Sourced; needs `set -euo pipefail`,
# `step`, `fail`, WORK, a folder of the caller's that it removes after daemon_stop, and CACHE, one that it keeps.
#
#   daemon_find        sets DOCKER, COMPOSE, BUILD_FLAGS; exports DOCKER_HOST if the daemon is ours
#   daemon_has IMAGE   if it is here or a registry gives it
#   daemon_image IMAGE MADE [NAME PACKAGES]
#                      prints on stdout what can be had: IMAGE, or MADE, Debian with these packages, else with its Python
#                      and etcd; CACHE keeps it as NAME
#   daemon_stop        ends the daemon if it is ours
#
# Our own daemon has everything below WORK and changes nothing on the host: no iptables
# rules, no forwarding, no docker0. Containers have the bridge of their compose project, which the
# userland proxy reaches, and no way out; builds need one, and use the host's network.

DAEMON_DIR=$WORK/daemon
DAEMON_CGROUP=kvstore-docker-test-$$
BUILD_FLAGS=()
PATH=$PATH:/usr/sbin:/sbin # dockerd, after a `su` that kept a user's PATH

daemon_find() {
    if [[ -z $(_reaching) ]]; then
        _can_install || fail "no Docker daemon answers (DOCKER_HOST=${DOCKER_HOST:-not set}).
Start one, or run this as root on Debian: then it installs Docker and starts a daemon of its own."
        _install
        # Where systemd runs, the package has started its daemon.
        [[ -n $(_reaching) ]] || _start
    fi
    DOCKER=$(_with_buildkit)
    [[ -n $DOCKER ]] || fail "no docker client on the PATH can build with BuildKit: install the buildx plugin."
    if "$DOCKER" compose version >/dev/null 2>&1; then
        COMPOSE=("$DOCKER" compose)
    elif command -v docker-compose >/dev/null; then
        COMPOSE=(docker-compose)
    else
        fail "neither 'docker compose' nor docker-compose is installed."
    fi
}

daemon_has() { "$DOCKER" image inspect "$1" >/dev/null 2>&1 || "$DOCKER" pull -q "$1" >/dev/null 2>&1; }

# The image itself if it can be had. Otherwise one that the Dockerfile and the compose files accept as well. It is made
# once a month.
daemon_image() {
    local image=$1 made=$2 kept=$CACHE/${3:-debian}.tar packages=${4:-ca-certificates,python3,python3-pip,etcd-server}
    if daemon_has "$image"; then
        echo "$image"
        return
    fi
    _can_install || fail "$image is not here and no registry gives it. Run this as root on Debian: then it makes one
with mmdebstrap. Or set BASE to an image that has Python >= 3.11 and pip, KVSTORE_ETCD_IMAGE to one that has etcd,
PROMETHEUS_IMAGE to one of Prometheus."
    if [[ -z $(find "$kept" -mtime -30 2>/dev/null) ]]; then
        _install
        step "$image can not be had; making one with mmdebstrap" >&2
        mkdir -p "$CACHE"
        TMPDIR=$WORK mmdebstrap --format=tar --variant=minbase --include="$packages" \
            bookworm "$kept.new" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$WORK/mmdebstrap.log" 2>&1 \
            || fail "mmdebstrap: $(tail -n 5 "$WORK/mmdebstrap.log")"
        mv "$kept.new" "$kept"
    fi
    "$DOCKER" image inspect "$made" >/dev/null 2>&1 || "$DOCKER" import "$kept" "$made" >/dev/null
    echo "$made"
}

daemon_stop() {
    local pid="" tries
    pid=$(cat "$DAEMON_DIR/pid" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || true
    for ((tries = 0; tries < 120; tries++)); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.25
    done
    find /sys/fs/cgroup -depth -type d -path "*/$DAEMON_CGROUP*" -exec rmdir {} + 2>/dev/null || true
}

# The docker clients on the PATH that reach a daemon.
_reaching() {
    local client
    for client in $(type -ap docker); do
        if "$client" version --format '{{.Server.Version}}' >/dev/null 2>&1; then echo "$client"; fi
    done
}

# The first of them that has BuildKit: a new client without its plugin knows only the old builder.
_with_buildkit() {
    local client help
    for client in $(_reaching); do
        help=$(DOCKER_BUILDKIT=1 "$client" build --help 2>/dev/null) || continue
        if [[ $help == *--secret* ]]; then
            echo "$client"
            return
        fi
    done
}

_can_install() {
    [[ $(id -u) == 0 ]] && grep -qx ID=debian /etc/os-release
}

_install() {
    local packages=()
    [[ -n $(type -ap dockerd) ]] || packages+=(docker.io)
    [[ -n $(type -ap docker-compose) ]] || packages+=(docker-compose)
    [[ -n $(type -ap mmdebstrap) ]] || packages+=(mmdebstrap)
    [[ ${#packages[@]} -gt 0 ]] || return 0
    step "installing ${packages[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; } >"$WORK/apt.log" 2>&1 \
        || fail "apt-get: $(tail -n 5 "$WORK/apt.log")"
    hash -r
}

_start() {
    local tries
    step "starting a Docker daemon of our own"
    mkdir "$DAEMON_DIR"
    export DOCKER_HOST="unix://$DAEMON_DIR/docker.sock"
    BUILD_FLAGS=(--network host)
    # In a session of its own, so that Ctrl-C ends the test and not the daemon that its cleanup needs.
    setsid dockerd --data-root "$DAEMON_DIR/data" --exec-root "$DAEMON_DIR/exec" --pidfile "$DAEMON_DIR/pid" \
        -H "$DOCKER_HOST" --bridge none --iptables=false --ip6tables=false --ip-masq=false --ip-forward=false \
        --cgroup-parent "$DAEMON_CGROUP" >"$WORK/dockerd.log" 2>&1 &
    for ((tries = 0; tries < 120; tries++)); do
        [[ -z $(_reaching) ]] || return 0
        sleep 0.25
    done
    fail "dockerd did not start: $(tail -n 5 "$WORK/dockerd.log")"
}
