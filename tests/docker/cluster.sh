# shellcheck shell=bash
# Checks docker/compose.cluster.yaml for tests/docker/test.sh: three nodes are one store, and one of them is killed.
# Sourced; needs `step`, `fail`, `pick`, WORK, PROJECT, IMAGE, DOCKER, COMPOSE and what `start` exported.
#
#   check_cluster R [etcd]   puts, kills, gets, restarts; on a fixed list, or on etcd
#   cluster_stop             removes containers and volumes

CLUSTER_PAGES=12

cluster_compose() { "${COMPOSE[@]}" --project-name "$PROJECT-cluster" --file docker/compose.cluster.yaml "$@"; }

in_cluster() { "$DOCKER" exec --interactive "$(cluster_compose ps --quiet n1)" "$@"; }

cluster_stop() {
    cluster_compose --file docker/compose.monitoring.yaml down --volumes --remove-orphans >/dev/null 2>&1 || true
}

# cluster_answers COUNT: until `kvstore cluster` tells that so many members answer; it fails while one does not.
cluster_answers() {
    local tries answer=0
    for ((tries = 0; tries < 120; tries++)); do
        answer=$(in_cluster kvstore cluster --json 2>"$WORK/cluster.log" \
            | python3 -c 'import json, sys; print(sum(some["answers"] for some in json.load(sys.stdin)["members"]))') || true
        [[ $answer != "$1" ]] || return 0
        sleep 0.25
    done
    fail "$answer members answer, not $1: $(cat "$WORK/cluster.log")"
}

# cluster_back: how many pages are listed; all of them come back with the bytes that were put.
cluster_back() {
    local keys=()
    read -ra keys < <(in_cluster kvstore ls --model cluster --json 2>"$WORK/cluster.log" \
        | python3 -c 'import json, sys; print(*(page["prefix_hash"] for page in json.load(sys.stdin)["pages"]))')
    in_cluster kvstore get --model cluster "${keys[@]}" >"$WORK/back" 2>"$WORK/cluster.log" \
        || fail "get of ${#keys[@]} pages failed: $(cat "$WORK/cluster.log")"
    (cd "$WORK/pages" && cat "${keys[@]}") | cmp --silent - "$WORK/back" || fail "pages came back with other bytes"
    echo "${#keys[@]}"
}

cluster_put() {
    local page keys=()
    rm -rf "$WORK/pages"
    mkdir "$WORK/pages"
    for ((page = 1; page <= CLUSTER_PAGES; page++)); do
        keys+=("$(printf 'page %d' "$page" | sha256sum | cut -d ' ' -f 1)")
        head -c 65536 /dev/urandom >"$WORK/pages/${keys[-1]}"
    done
    (cd "$WORK/pages" && cat "${keys[@]}") \
        | in_cluster kvstore put - "${keys[@]}" --create-opaque cluster --ack all >/dev/null \
        || fail "put into the cluster failed"
    in_cluster kvstore flush >/dev/null || fail "flush of the cluster failed"
}

# The members know each other by a certificate and a token; who has none of both is told of none of them.
cluster_stranger() {
    local said status=0
    said=$("$DOCKER" run --rm --label "$PROJECT" --network "$PROJECT-cluster_default" \
        --volume "$PROJECT-cluster_secrets:/secrets:ro" --env KVSTORE_TLS_CA=/secrets/ca.pem --env KVSTORE_ADDRESS=n2:7440 \
        --env KVSTORE_TLS_CERT=/secrets/client.pem --env KVSTORE_TLS_KEY=/secrets/client.key \
        --entrypoint kvstore "$IMAGE" cluster 2>&1) || status=$?
    [[ $status == 2 && $said == *"does not know this certificate"* ]] || fail "a stranger at n2: exit status $status: $said"
    said=$("$DOCKER" run --rm --label "$PROJECT" --network "$PROJECT-cluster_default" --env KVSTORE_ADDRESS=n2:7440 \
        --entrypoint kvstore "$IMAGE" cluster 2>&1) && fail "a stranger without TLS was answered: $said"
    [[ $said == *"the node uses TLS"* ]] || fail "a stranger without TLS at n2: $said"
}

check_cluster() {
    local back victim
    export KVSTORE_NODE_REPLICAS=$1
    if [[ ${2:-} == etcd ]]; then export COMPOSE_PROFILES=etcd KVSTORE_NODE_CLUSTER=etcd://etcd:2379/fleet; fi
    cluster_compose up --detach --no-build >"$WORK/up.log" 2>&1 || fail "compose up: $(tail -n 5 "$WORK/up.log")"
    cluster_answers 3
    in_cluster python /opt/kvstore/health.py || fail "n1 is not healthy"
    cluster_put
    back=$(cluster_back)
    [[ $back == "$CLUSTER_PAGES" ]] || fail "$back of $CLUSTER_PAGES pages came back"
    cluster_stranger
    step "three nodes, R=$1${2:+, on $2}: $CLUSTER_PAGES pages put and got, with TLS and tokens; strangers are refused"
    victim=$(cluster_compose ps --quiet n2)
    "$DOCKER" kill "$victim" >/dev/null
    cluster_answers 2
    back=$(cluster_back)
    if [[ $1 == 1 ]]; then
        [[ $back -gt 0 && $back -lt $CLUSTER_PAGES ]] || fail "$back of $CLUSTER_PAGES pages came back without n2"
    elif [[ $back != "$CLUSTER_PAGES" ]]; then
        fail "$back of $CLUSTER_PAGES pages came back without n2, of which others have replicas"
    fi
    step "docker kill n2: $back of $CLUSTER_PAGES pages come back"
    "$DOCKER" start "$victim" >/dev/null
    cluster_answers 3
    back=$(cluster_back)
    [[ $back == "$CLUSTER_PAGES" ]] || fail "$back of $CLUSTER_PAGES pages came back when n2 had"
    step "docker start n2: all $CLUSTER_PAGES pages come back"
    cluster_stop
}
