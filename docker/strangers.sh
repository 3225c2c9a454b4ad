# shellcheck shell=bash
# Checks for docker/test.sh who is let in by docker/compose.yaml's node: over the published ports, who has the authority's
# certificate and a token of this project, and nobody else. Sourced; needs `step`, `fail`, `in_node`, `compose`, WORK, NODE,
# KVSTORE and what `start` exported.
#
#   copy_out           ca.pem and engine.token, as docker/compose.yaml says, into WORK
#   check_published    the engine's pages over gRPC and bulk TCP, counts over HTTPS
#   check_strangers    without a token, with a wrong one, plainly, of another tenant, revoked
#   check_up_again     nothing is made anew

copy_out() {
    local file
    for file in ca.pem engine.token; do
        "$DOCKER" cp "$NODE:/secrets/$file" "$WORK/$file" || fail "docker cp of $file failed"
    done
    [[ $(stat -c %a "$WORK/engine.token") == 600 ]] || fail "engine.token came out with mode $(stat -c %a "$WORK/engine.token")"
}

# host VARIABLE=VALUE... COMMAND...: `kvstore COMMAND` on this host with the files that were copied out.
host() {
    local variables=()
    while [[ ${1:-} == *=* ]]; do
        variables+=("$1")
        shift
    done
    env KVSTORE_ADDRESS="127.0.0.1:$KVSTORE_NODE_PORT" KVSTORE_TLS_CA="$WORK/ca.pem" \
        KVSTORE_TOKEN_FILE="$WORK/engine.token" ${variables[@]+"${variables[@]}"} "$KVSTORE" "$@"
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
    refused 2 "asks who you are" KVSTORE_TOKEN_FILE= "${get[@]}"
    refused 2 "does not know this token" KVSTORE_TOKEN_FILE= KVSTORE_TOKEN=default.wrong "${get[@]}"
    refused 3 "the node speaks TLS" KVSTORE_TLS_CA= "${get[@]}"
    refused 2 "flush asks for admin" flush
    token=$(in_node kvstore tokens add neighbour --tenant team-b) || fail "kvstore tokens add failed"
    _await_known "$token" 1
    refused 1 "no namespace with model 'durable'" KVSTORE_TOKEN_FILE= KVSTORE_TOKEN="$token" "${get[@]}"
    in_node kvstore tokens revoke neighbour >/dev/null || fail "kvstore tokens revoke failed"
    _await_known "$token" 2
    step "refused: no token, a wrong one, no TLS, what an engine may not do, another tenant's page; a token that was revoked"
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

# _await_known TOKEN STATUS: until `kvstore ls` as who has it ends so: 1, nothing is his; 2, nobody knows him. The file is
# looked at each second.
_await_known() {
    local tries status
    for ((tries = 0; tries < 60; tries++)); do
        status=0
        host KVSTORE_TOKEN_FILE= KVSTORE_TOKEN="$1" ls >"$WORK/known" 2>&1 || status=$?
        [[ $status != "$2" ]] || return 0
        sleep 0.25
    done
    fail "ls ends with status $status, not $2: $(cat "$WORK/known")"
}

# _scrape STATUS TOKEN: what the metrics' port answers.
_scrape() {
    local status
    status=$(python3 -c 'import ssl, sys, urllib.error, urllib.request
authority, port, token = *sys.argv[1:3], sys.stdin.read().strip()
request = urllib.request.Request(f"https://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority)))
try:
    print(opener.open(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)' "$WORK/ca.pem" "$KVSTORE_NODE_METRICS_PORT" <<<"$2") || fail "the metrics' port does not answer"
    [[ $status == "$1" ]] || fail "metrics answered $status, not $1"
}
