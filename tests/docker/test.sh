#!/usr/bin/env bash
# Builds the node's image, runs docker/compose.yaml with it and checks what they promise: healthy, user
# 10001, read-only root, pages through the CLI and back, durable and flushed ones after SIGKILL, from the host
# with TLS and a token, and strangers kept out (tests/docker/strangers.sh), a second container kept off the volume,
# SIGTERM drains, other containers share the node's memory if they may, and leave nothing behind when they are
# killed; then docker/compose.cluster.yaml, three nodes of which one is killed (tests/docker/cluster.sh); both with
# docker/compose.monitoring.yaml beside them (tests/docker/monitoring.sh); and an engine's image with the agent (tests/docker/agent.sh).
# `make docker-test` runs it; 3 minutes on two idle cores, 10 to 15 on busy ones. Leaves behind what apt-get installed, CACHE
# and, in a Docker that was there, the images that it pulled and the build cache.
#
# Uses the Docker that is there, or as root on Debian one of its own (tests/docker/daemon.sh).
#   BASE           base image; without a registry one is made with mmdebstrap
#   CACHE          folder that keeps what was made
#   PIP_CERT       CA bundle of the package index, given to the build as a secret
#   DEBIAN_MIRROR  for mmdebstrap
#   KVSTORE        a `kvstore` command on this host, to try the published ports
set -euo pipefail
cd "$(dirname "$0")/../.."
exec </dev/null

# Not /tmp: it may be small, or forbid the device nodes that mmdebstrap makes.
WORK=$(mktemp -d /var/tmp/kvstore-docker-test.XXXXXX)
PROJECT=kvstore-test-$$
IMAGE=kvstore-node:test-$$
BASE=${BASE:-python:3.11-slim-bookworm}
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore-docker-test}
KVSTORE=${KVSTORE:-.venv/bin/kvstore}
RAM_MIB=256
PAGE_NBYTES=$((4 << 20))
DOCKER="" COMPOSE=() NODE="" PUBLISHED="published ports with TLS and tokens, strangers refused,"

step() { printf 'docker-test %4ds  %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'docker-test: %s\n' "$*" >&2
    exit 1
}

# shellcheck source=tests/docker/daemon.sh
. tests/docker/daemon.sh
# shellcheck source=tests/docker/strangers.sh
. tests/docker/strangers.sh
# shellcheck source=tests/docker/cluster.sh
. tests/docker/cluster.sh
# shellcheck source=tests/docker/monitoring.sh
. tests/docker/monitoring.sh
# shellcheck source=tests/docker/agent.sh
. tests/docker/agent.sh

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    if [[ $status != 0 && -n $NODE ]]; then
        echo "docker-test: the node said:" >&2
        "$DOCKER" logs --tail 30 "$NODE" >&2 || true
    fi
    if [[ ${#COMPOSE[@]} -gt 0 ]]; then
        "$DOCKER" ps --all --quiet --filter "label=$PROJECT" \
            | xargs --no-run-if-empty "$DOCKER" rm --force >/dev/null 2>&1 || true
        "$DOCKER" volume rm --force "$BY_HAND" "$SHOWN" >/dev/null 2>&1 || true
        compose --file docker/compose.monitoring.yaml down --volumes --remove-orphans >/dev/null 2>&1 || true
        cluster_stop
        "$DOCKER" image rm --force "$IMAGE" "$IMAGE-agent" "$IMAGE-engine" "$IMAGE-prometheus" \
            "$IMAGE-prometheus-base" "$IMAGE-base" >/dev/null 2>&1 || true
    fi
    daemon_stop
    # Never delete through a mount that a daemon may have left behind.
    if grep -q " $WORK/" /proc/mounts 2>/dev/null; then
        echo "docker-test: there are mounts below $WORK; it stays" >&2
    else
        rm -rf "$WORK"
    fi
    [[ $status == 0 ]] || echo "docker-test: FAILED" >&2
    exit "$status"
}

compose() { "${COMPOSE[@]}" --project-name "$PROJECT" --file docker/compose.yaml "$@"; }

in_node() { "$DOCKER" exec --interactive "$NODE" "$@"; }

field() { "$DOCKER" inspect --format "$1" "$NODE"; }

megabytes() { echo $(($("$DOCKER" image inspect --format '{{.Size}}' "$1") / 1000000)); }

build() {
    local base secret=() started
    base=$(daemon_image "$BASE" "$IMAGE-base")
    started=$SECONDS
    [[ -z ${PIP_CERT:-} ]] || secret=(--secret "id=ca,src=$PIP_CERT")
    step "building on $base"
    DOCKER_BUILDKIT=1 "$DOCKER" build ${BUILD_FLAGS[@]+"${BUILD_FLAGS[@]}"} ${secret[@]+"${secret[@]}"} \
        --build-arg "BASE=$base" --file docker/node.Dockerfile --tag "$IMAGE" . >"$WORK/build.log" 2>&1 \
        || fail "the image does not build: $(tail -n 25 "$WORK/build.log")"
    step "built in $((SECONDS - started)) s: $(megabytes "$IMAGE") MB; the base that it was gathered from has $(megabytes "$base") MB"
}

# Other ports than the default ones: a node may run on this host. RAM is more than /dev/shm has (64 MB),
# and the memory limit is as tight as docker/compose.yaml allows.
start() {
    local ports
    read -ra ports < <(python3 -c 'import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))')
    export KVSTORE_IMAGE=$IMAGE KVSTORE_NODE_DISK_BYTES=1GiB
    export KVSTORE_NODE_RAM_BYTES=${RAM_MIB}MiB KVSTORE_MEMORY_LIMIT=$((RAM_MIB + RAM_MIB / 64 + 512 + 384))m
    export KVSTORE_NODE_PORT=${ports[0]} KVSTORE_NODE_BULK_PORT=${ports[1]} KVSTORE_NODE_METRICS_PORT=${ports[2]}
    compose up --detach --no-build >"$WORK/up.log" 2>&1 || fail "compose up: $(tail -n 5 "$WORK/up.log")"
    NODE=$(compose ps --quiet node)
    [[ -n $NODE ]] || fail "compose started no container: $(cat "$WORK/up.log")"
}

# Docker's verdict, once: it asks every 10 s only.
await_healthy() {
    local tries
    for ((tries = 0; tries < 240; tries++)); do
        case $(field '{{.State.Status}} {{.State.Health.Status}}') in
            "running healthy") return ;;
            exited* | dead* | restarting*) break ;;
        esac
        sleep 0.25
    done
    fail "not healthy: $(field '{{.State.Status}}, out of memory: {{.State.OOMKilled}}, {{json .State.Health}}')"
}

await_serving() {
    local tries
    for ((tries = 0; tries < 60; tries++)); do
        if in_node python /opt/kvstore/health.py 2>"$WORK/health.log"; then return; fi
        sleep 0.25
    done
    fail "does not serve: $(cat "$WORK/health.log")"
}

# put NAME [FLAG...]: one page of random bytes, in a namespace of that name.
put() {
    head -c $PAGE_NBYTES /dev/urandom >"$WORK/$1"
    in_node kvstore put - --create-opaque "$1" --tokens 1 "${@:2}" <"$WORK/$1" >/dev/null || fail "put $* failed"
}

# same NAME WHEN: reads the page and compares it with what was put.
same() {
    in_node kvstore get --model "$1" --tokens 1 >"$WORK/back" || fail "get $1 failed $2"
    cmp "$WORK/$1" "$WORK/back" || fail "$1 came back with other bytes $2"
    step "page '$1': same bytes $2"
}

# pick NAME...: the value of that name in the JSON on stdin, or of the second name in what the first one names.
pick() {
    python3 -c 'import functools, json, sys
print(functools.reduce(lambda value, name: value[name], sys.argv[1:], json.load(sys.stdin)))' "$@"
}

# disk FIELD: a number out of `kvstore status`.
disk() { in_node kvstore status --json | pick disk "$1"; }

check_confinement() {
    local user tool
    user=$(in_node python -c 'import os; print(os.getuid())')
    [[ $user == 10001 ]] || fail "the node runs as user $user"
    if "$DOCKER" exec --user 0 "$NODE" python -c 'open("/probe", "w")' 2>/dev/null; then
        fail "the root file system can be written"
    fi
    in_node python -c 'import os; open("/data/probe", "w"); os.remove("/data/probe")' || fail "/data can not be written"
    for tool in sh bash busybox apt dpkg perl gcc pip curl; do
        if "$DOCKER" exec "$NODE" "$tool" --version >/dev/null 2>&1; then fail "the image has $tool"; fi
        in_node python -c 'import os, sys; sys.exit(any(os.path.exists(f"{folder}/{sys.argv[1]}")
for folder in ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin")))' "$tool" || fail "the image has $tool"
    done
    in_node python -c 'import ssl; ssl.create_default_context()' || fail "the image has no TLS"
    in_node python -c 'import os, stat, sys
others = [name for name in os.listdir("/secrets") if os.stat("/secrets/" + name).st_mode & stat.S_IRWXO]
sys.exit(sorted(others) != ["ca.pem", "client.pem", "node.pem"] or os.stat("/secrets").st_mode & stat.S_IRWXO)' || fail "/secrets lies open"
    step "user 10001, root file system read-only, /data writable, /secrets closed; no shell, no package manager, no pip"
}

# SIGKILL right after the acknowledgement of the durable put; nothing of it was flushed.
check_kill() {
    local pages
    put flushed
    in_node kvstore flush >/dev/null || fail "flush failed"
    put durable --durable
    "$DOCKER" kill "$NODE" >/dev/null
    "$DOCKER" wait "$NODE" >/dev/null
    [[ $(field '{{.State.ExitCode}}') == 137 ]] || fail "docker kill: exit status $(field '{{.State.ExitCode}}')"
    "$DOCKER" start "$NODE" >/dev/null
    await_serving
    pages=$(disk page_count)
    [[ $pages == 2 ]] || fail "kvstore status tells of $pages pages on disk after docker kill, not of 2"
    step "docker kill, start: serves, and kvstore status tells of 2 pages on disk"
    same durable "after docker kill"
    same flushed "after docker kill"
    [[ $(disk pages_read) == 2 ]] || fail "the pages did not come from the disk"
    in_node kvstore status | sed -n '/^disk /s/^/    /p'
}

# The volume has one node at a time; the first one does not notice the attempt.
check_second() {
    local said status=0
    said=$("$DOCKER" run --rm --network none --read-only --volumes-from "$NODE" "$IMAGE" --data-dir /data 2>&1) \
        || status=$?
    [[ $status == 2 && $said == *"/data is in use by another node"* ]] \
        || fail "a second container on the same volume: exit status $status: $said"
    step "a second container on the volume: exit status 2, '$said'"
    same durable "after that"
}

# SIGKILL after the grace period would give 137, and nothing but a drain gives 0.
check_stop() {
    local started
    put drained
    started=${EPOCHREALTIME/[.,]/}
    "$DOCKER" stop -t 30 "$NODE" >/dev/null
    [[ $(field '{{.State.ExitCode}}') == 0 ]] || fail "docker stop: exit status $(field '{{.State.ExitCode}}')"
    step "docker stop: drained, exit status 0 after $(((${EPOCHREALTIME/[.,]/} - started) / 1000)) ms"
    "$DOCKER" start "$NODE" >/dev/null
    await_serving
    same drained "after docker stop"
}

# client FLAG... IMAGE COMMAND...: `kvstore COMMAND` in a container that has the network, the socket's volume and
# the secrets in common with the node's, and nothing else; as the engine. Its memory limit is half of the arena
# that it maps, and its seccomp profile is Docker's own.
client() {
    "$DOCKER" run --label "$PROJECT" --network "${PROJECT}_default" --volume "${PROJECT}_socket:/run/kvstore:ro" \
        --volume "${PROJECT}_secrets:/secrets:ro" --env KVSTORE_TLS_CA=/secrets/ca.pem \
        --env KVSTORE_TLS_CERT=/secrets/client.pem --env KVSTORE_TLS_KEY=/secrets/client.key \
        --env KVSTORE_TOKEN_FILE=/secrets/engine.token \
        --read-only --memory $((RAM_MIB / 2))m --memory-swap $((RAM_MIB / 2))m \
        --env "KVSTORE_ADDRESS=node:$KVSTORE_NODE_PORT" --entrypoint kvstore "$@"
}

# _show_to USER: copies of what clients show, in a volume of their own, for a user who may not read the secrets.
_show_to() {
    "$DOCKER" run --rm --user 0 --network none --volume "${PROJECT}_secrets:/secrets:ro" --volume "$SHOWN:/shown" \
        --entrypoint python "$IMAGE" -c 'import os, shutil, sys
os.chmod("/shown", 0o755)
for name in ("client.pem", "client.key"):
    os.chown(shutil.copy("/secrets/" + name, "/shown"), int(sys.argv[1]), 10001)
    os.chmod("/shown/" + name, 0o600)' "$1" || fail "the certificate of clients can not be copied"
}

# travels WANTED WIRE FLAG...: with --wire WANTED, pages of such a client go and come by WIRE.
travels() {
    local report wire
    report=$(client --rm "${@:3}" "$IMAGE" bench --wire "$1" --seconds 1 --json 2>"$WORK/client.log") \
        || fail "bench --wire $1 in a container with ${*:3}: $(cat "$WORK/client.log")"
    wire=$(pick wire <<<"$report")
    [[ $wire == "$2" ]] || fail "bench --wire $1 in a container with ${*:3} used $wire, not $2"
    step "another container, ${*:3}, --wire $1: $wire," \
        "put $(pick put gb_per_s <<<"$report"), get $(pick get gb_per_s <<<"$report") GB/s"
}

check_shared() {
    local said status=0 other=(--user 20002 --group-add 10001 --env KVSTORE_TOKEN_FILE= --env KVSTORE_TOKEN)
    other+=(--volume "$SHOWN:/shown:ro" --env KVSTORE_TLS_CERT=/shown/client.pem --env KVSTORE_TLS_KEY=/shown/client.key)
    local known=(--env KVSTORE_TLS_CERT=/secrets/client.pem --env KVSTORE_TLS_KEY=/secrets/client.key)
    _show_to 20002
    travels auto shm --user 10001 --cap-drop ALL
    travels shm shm --user 0 --env KVSTORE_SHM_DIR=/run/kvstore
    local -x KVSTORE_TOKEN # of user 20002, who sees the authority's certificate and can not read the token's file
    KVSTORE_TOKEN=$(cat "$WORK/engine.token")
    travels auto bulk "${other[@]}"
    said=$(client --rm "${other[@]}" "$IMAGE" bench --wire shm --seconds 1 2>&1) || status=$?
    [[ $status == 3 && $said == *"/run/kvstore/node.sock failed: "*"Permission denied"* ]] \
        || fail "bench --wire shm as user 20002: exit status $status: $said"
    step "another container, --user 20002, --wire shm: exit status 3, Permission denied"
    KVSTORE_TOKEN=$(add_neighbour)
    await_known "$KVSTORE_TOKEN" 1
    status=0
    said=$(client --rm "${other[@]}" --user 10001 "${known[@]}" "$IMAGE" bench --wire shm --seconds 1 2>&1) || status=$?
    [[ $status != 0 && $said == *"does not trust tenant team-b with its memory"* ]] \
        || fail "bench --wire shm of tenant team-b: exit status $status: $said"
    in_node kvstore tokens revoke neighbour >/dev/null || fail "kvstore tokens revoke failed"
    unset KVSTORE_TOKEN
    step "another container, tenant team-b, --wire shm: exit status $status, does not trust tenant team-b with its memory"
    client --rm --env KVSTORE_WIRE=shm "$IMAGE" get --model drained --tokens 1 >"$WORK/shared" \
        2>"$WORK/client.log" || fail "get over shared memory failed: $(cat "$WORK/client.log")"
    cmp "$WORK/drained" "$WORK/shared" || fail "another container read other bytes from shared memory"
    step "page 'drained': same bytes in another container, from shared memory"
}

# What the node keeps for clients: pages being written, pages being read, connections, connections and
# pages of those that went without a release.
kept() {
    in_node kvstore status --json | python3 -c 'import json, sys
status = json.load(sys.stdin)
ram, shm = status["ram"], status["shm"]
print(ram["writing_count"], ram["held_count"], shm["client_count"], shm["orphan_count"], shm["orphan_page_count"])'
}

# Stopped, the client stays in the middle of a put, and the kill surely hits it there. By a signal: Docker's own pause needs
# a freezer that gives up on a busy machine. Its calls have time enough to be stopped in.
check_killed_client() {
    local victim writing=0 tries after
    victim=$(client --detach --env KVSTORE_TIMEOUT_S=600 "$IMAGE" bench --wire shm --threads 2 --seconds 600 \
        2>"$WORK/client.log") \
        || fail "no client to kill: $(cat "$WORK/client.log")"
    for ((tries = 0; tries < 60; tries++)); do
        "$DOCKER" kill --signal STOP "$victim" >/dev/null || fail "the client ended: $("$DOCKER" logs "$victim" 2>&1)"
        read -r writing _ < <(kept)
        [[ $writing == 0 ]] || break
        "$DOCKER" kill --signal CONT "$victim" >/dev/null || fail "the client ended: $("$DOCKER" logs "$victim" 2>&1)"
        sleep 0.1
    done
    [[ $writing -gt 0 ]] || fail "the client was never seen writing"
    "$DOCKER" kill "$victim" >/dev/null
    for ((tries = 0; tries < 20; tries++)); do
        after=$(kept)
        [[ $after != "0 0 0 0 0" ]] || break
        sleep 0.25
    done
    [[ $after == "0 0 0 0 0" ]] || fail "after docker kill of a client the node keeps $after, in the order of kept()"
    step "docker kill of a client that was writing $writing pages in shared memory: the node keeps none of them"
}

trap clean_up EXIT
trap 'exit 130' INT TERM
daemon_find
step "Docker $("$DOCKER" version --format '{{.Server.Version}}') through $DOCKER," \
    "${COMPOSE[*]} $("${COMPOSE[@]}" version --short)"
build
start
await_healthy
step "healthy, with $RAM_MIB MiB of RAM tier in $KVSTORE_MEMORY_LIMIT of memory"
check_confinement
check_kill
copy_out
check_published
check_up_again
check_second
check_stop
check_shared
check_killed_client
check_by_hand
monitoring_images
check_monitored_node
check_cluster 1
check_monitored_cluster
KVSTORE_ETCD_IMAGE=$(daemon_image "${KVSTORE_ETCD_IMAGE:-quay.io/coreos/etcd:v3.5.21}" "$IMAGE-base")
export KVSTORE_ETCD_IMAGE
check_cluster 2 etcd
check_agent
step "passed: build, health, confinement, durable and flushed pages after SIGKILL," \
    "$PUBLISHED second node refused, drain, memory shared between containers, three nodes of which one is killed," \
    "Prometheus$GRAFANA beside one node and three, an engine's image with the agent"
