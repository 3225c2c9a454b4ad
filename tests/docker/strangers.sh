# shellcheck shell=bash
# Checks for tests/docker/test.sh who is let in by docker/compose.yaml's node: over the published ports, who has the
# authority's certificate and a token of this project, and nobody else. Sourced; needs `step`, `fail`, `pick`, `in_node`,
# `compose`, DOCKER, IMAGE, PROJECT, WORK, NODE, KVSTORE and what `start` exported.
#
#   BY_HAND SHOWN      volume of the last of them; of what clients show, for another user
#   add_neighbour      somebody of another tenant
#   await_known        until the node knows who was added, or who was revoked no more
#   copy_out           what a client needs, as docker/compose.yaml says, into WORK
#   check_published    the engine's pages over gRPC and bulk TCP, counts over HTTPS
#   check_strangers    without a token, with a wrong one, plainly, of another tenant, revoked
#   check_up_again     nothing is made anew
#   check_by_hand      the commands of docker/node.Dockerfile

BY_HAND=$PROJECT-by-hand
SHOWN=$PROJECT-shown

copy_out() {
    local file
    for file in ca.pem client.pem client.key engine.token; do
        "$DOCKER" cp "$NODE:/secrets/$file" "$WORK/$file" || fail "docker cp of $file failed"
    done
    [[ $(stat -c %a "$WORK/engine.token") == 600 ]] || fail "others may read engine.token when it has come out"
}

# host VARIABLE=VALUE... COMMAND...: `kvstore COMMAND` on this host with the files that were copied out.
host() {
    local variables=()
    while [[ ${1:-} == *=* ]]; do
        variables+=("$1")
        shift
    done
    env KVSTORE_ADDRESS="127.0.0.1:$KVSTORE_NODE_PORT" KVSTORE_TLS_CA="$WORK/ca.pem" \
        KVSTORE_TLS_CERT="$WORK/client.pem" KVSTORE_TLS_KEY="$WORK/client.key" \
        KVSTORE_TOKEN_FILE="$WORK/engine.token" ${variables[@]+"${variables[@]}"} "$KVSTORE" "$@"
}

# add_neighbour: an identity of tenant team-b; prints its token.
add_neighbour() {
    in_node kvstore tokens add neighbour --tenant team-b 2>"$WORK/tokens.log" \
        || fail "kvstore tokens add failed: $(cat "$WORK/tokens.log")"
}

# refused STATUS SAID VARIABLE=VALUE... COMMAND...: it ends so, and says that; over both wires that cross the network.
refused() {
    local said status wire
    for wire in grpc bulk; do
        status=0
        said=$(host KVSTORE_WIRE=$wire "${@:3}" 2>&1 >"$WORK/refused") || status=$?
        [[ $status == "$1" && $said == *"$2"* ]] || fail "${*:3} over $wire: exit status $status, not $1 and '$2': $said"
        [[ ! -s $WORK/refused ]] || fail "${*:3} over $wire was refused, and told something: $(head -c 200 "$WORK/refused")"
    done
}

check_published() {
    local wire
    if [[ ! -x $KVSTORE ]]; then
        step "LEFT OUT: published ports and strangers; there is no $KVSTORE on this host (make setup)"
        PUBLISHED=""
        return
    fi
    for wire in bulk grpc; do
        host KVSTORE_WIRE=$wire get --model durable --tokens 1 --output "$WORK/host" || fail "get over published $wire failed"
        cmp "$WORK/durable" "$WORK/host" || fail "the host read other bytes over $wire"
    done
    _scrape 200 "$(cat "$WORK/engine.token")"
    _scrape 401 ""
    step "page 'durable': same bytes through the published gRPC and bulk ports, with TLS and a token; metrics by HTTPS, too"
    check_strangers
}

check_strangers() {
    local token get=(get --model durable --tokens 1)
    refused 2 "does not know this certificate" KVSTORE_TOKEN_FILE= "${get[@]}"
    refused 3 "requires client certificates" KVSTORE_TLS_CERT= KVSTORE_TLS_KEY= "${get[@]}"
    refused 2 "does not know this token" KVSTORE_TOKEN_FILE= KVSTORE_TOKEN=default.wrong "${get[@]}"
    refused 3 "the node uses TLS" KVSTORE_TLS_CA= KVSTORE_TLS_CERT= KVSTORE_TLS_KEY= "${get[@]}"
    refused 2 "flush needs admin" flush
    token=$(add_neighbour)
    await_known "$token" 1
    refused 1 "no namespace with model 'durable'" KVSTORE_TOKEN_FILE= KVSTORE_TOKEN="$token" "${get[@]}"
    in_node kvstore tokens revoke neighbour >/dev/null || fail "kvstore tokens revoke failed"
    await_known "$token" 2
    step "refused: no token, a wrong one, no certificate, no TLS, what an engine may not do, another tenant's page; a token that was revoked"
}

check_up_again() {
    compose up --detach --no-build >"$WORK/up.log" 2>&1 || fail "compose up again: $(tail -n 5 "$WORK/up.log")"
    [[ $(compose ps --quiet node) == "$NODE" ]] || fail "compose up again made another container"
    "$DOCKER" cp "$NODE:/secrets/ca.pem" "$WORK/ca.again" && cmp "$WORK/ca.pem" "$WORK/ca.again" || fail "another authority"
    "$DOCKER" cp "$NODE:/secrets/engine.token" "$WORK/token.again" && cmp "$WORK/engine.token" "$WORK/token.again" \
        || fail "another token"
    [[ $(in_node kvstore tokens list --json | pick identities | tr -d -c '{' | wc -c) == 3 ]] || fail "other identities"
    step "compose up again: the same container, authority and tokens"
}

# What it does without a setting, and with those that docker/node.Dockerfile names.
check_by_hand() {
    local bare secured run=(run --label "$PROJECT" --network "${PROJECT}_default" --read-only)
    local secrets=(--volume "$BY_HAND:/secrets")
    local told=(--env KVSTORE_NODE_HOST=0.0.0.0 --env KVSTORE_NODE_IDENTITIES=/secrets/identities
        --env KVSTORE_NODE_TLS_CERT=/secrets/node.pem --env KVSTORE_NODE_TLS_KEY=/secrets/node.key
        --env KVSTORE_NODE_TLS_CLIENT_CA=/secrets/ca.pem
        --env KVSTORE_TLS_CERT=/secrets/node.pem --env KVSTORE_TLS_KEY=/secrets/node.key
        --env KVSTORE_TLS_CA=/secrets/ca.pem --env KVSTORE_TOKEN_FILE=/secrets/operator.token)
    bare=$("$DOCKER" "${run[@]}" --detach --network-alias bare "$IMAGE" --ram-bytes 64MiB)
    "$DOCKER" "${run[@]}" --rm "${secrets[@]}" --entrypoint python "$IMAGE" /opt/kvstore/first_start.py /secrets secured \
        >"$WORK/first_start.log" || fail "first_start.py failed: $(cat "$WORK/first_start.log")"
    secured=$("$DOCKER" "${run[@]}" --detach --network-alias secured "${secrets[@]}" "${told[@]}" "$IMAGE" --ram-bytes 64MiB)
    _await_status "$bare"
    _await_status "$secured"
    "$DOCKER" exec "$secured" python /opt/kvstore/health.py || fail "a node by hand is not healthy"
    "$DOCKER" "${run[@]}" --rm "${secrets[@]}" "${told[@]}" --env KVSTORE_ADDRESS=secured --entrypoint kvstore "$IMAGE" \
        status >/dev/null || fail "a node by hand does not answer who has its operator's token"
    if "$DOCKER" "${run[@]}" --rm --env KVSTORE_ADDRESS=bare --entrypoint kvstore "$IMAGE" status >/dev/null 2>&1; then
        fail "a node that was told nothing answers other containers"
    fi
    "$DOCKER" rm --force "$bare" "$secured" >/dev/null
    step "by hand: without settings a node answers docker exec alone, with those of docker/node.Dockerfile who has a token"
}

# _await_status CONTAINER: until `kvstore status` in it works.
_await_status() {
    local tries
    for ((tries = 0; tries < 60; tries++)); do
        if "$DOCKER" exec "$1" kvstore status >"$WORK/status.log" 2>&1; then return; fi
        sleep 0.25
    done
    fail "a node by hand does not serve: $(cat "$WORK/status.log") $("$DOCKER" logs "$1" 2>&1)"
}

# await_known TOKEN STATUS: until `kvstore ls` as who has it ends so: 1, nothing is his; 2, nobody knows him. The file is
# looked at each second.
await_known() {
    local tries status
    for ((tries = 0; tries < 60; tries++)); do
        status=0
        KVSTORE_TOKEN=$1 "$DOCKER" exec --env KVSTORE_TOKEN --env KVSTORE_TOKEN_FILE= "$NODE" kvstore ls \
            >"$WORK/known" 2>&1 || status=$?
        [[ $status != "$2" ]] || return 0
        sleep 0.25
    done
    fail "ls ends with status $status, not $2: $(cat "$WORK/known")"
}

# _scrape STATUS TOKEN: what the metrics' port answers.
_scrape() {
    local status
    status=$(python3 -c 'import ssl, sys, urllib.error, urllib.request
folder, port, token = *sys.argv[1:3], sys.stdin.read().strip()
context = ssl.create_default_context(cafile=folder + "/ca.pem")
context.load_cert_chain(folder + "/client.pem", folder + "/client.key")
credentials = {"Authorization": f"Bearer {token}"} if token else {}
request = urllib.request.Request(f"https://127.0.0.1:{port}/metrics", headers=credentials)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=context))
try:
    print(opener.open(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)' "$WORK" "$KVSTORE_NODE_METRICS_PORT" <<<"$2") || fail "the metrics' port does not answer"
    [[ $status == "$1" ]] || fail "metrics answered $status, not $1"
}
