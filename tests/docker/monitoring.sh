# shellcheck shell=bash disable=SC2034  # GRAFANA is the caller's
# Checks docker/compose.monitoring.yaml for tests/docker/test.sh: real Prometheus beside one node and beside three, and Grafana
# where a registry has it. Sourced; needs `step`, `fail`, `pick`, `compose` and `in_node`, tests/docker/daemon.sh,
# tests/docker/cluster.sh, WORK, PROJECT, IMAGE, DOCKER, NODE and what `start` exported.
#
#   GRAFANA                   " and Grafana", or empty where it was not tried
#   monitoring_images         Prometheus's image, or one made of Debian's; Grafana's if it can be had
#   check_monitored_node      beside the node that runs, which stays as it is
#   check_monitored_cluster   three nodes: traffic, figures, alerts, who is kept out, a node that is killed

GRAFANA=""

monitoring_images() {
    local wanted base
    wanted=$(_image_of prometheus)
    base=$(daemon_image "$wanted" "$IMAGE-prometheus-base" prometheus ca-certificates,prometheus)
    PROMETHEUS_IMAGE=$base
    [[ $base == "$wanted" ]] || _stand_in
    export PROMETHEUS_IMAGE
    GRAFANA_PORT=$(python3 -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
    export GRAFANA_PORT
    if daemon_has "$(_image_of grafana)"; then GRAFANA=" and Grafana"; else step "Grafana not tried: no registry"; fi
}

# Beside a node that was there before: the same container goes on.
check_monitored_node() {
    local up
    compose --file docker/compose.monitoring.yaml up --detach --no-build prometheus >"$WORK/up.log" 2>&1 \
        || fail "compose up beside one node: $(tail -n 5 "$WORK/up.log")"
    PROMETHEUS=$(compose --file docker/compose.monitoring.yaml ps --quiet prometheus)
    await_figure 1 'sum(up{job="kvstore"})'
    up=$(figures 'up{job="kvstore"} == 1')
    [[ $up == *"instance=\"node:$KVSTORE_NODE_METRICS_PORT\""* ]] || fail "Prometheus beside one node scrapes $up"
    [[ $(compose ps --quiet node) == "$NODE" ]] || fail "Prometheus beside the node made another node of it"
    step "Prometheus beside one node: scraped over TLS with a token of its own; the node's container is the same"
    compose --file docker/compose.monitoring.yaml rm --force --stop prometheus >/dev/null 2>&1 || fail "compose rm prometheus"
}

check_monitored_cluster() {
    local services=(n1 n2 n3 prometheus) back
    export KVSTORE_NODE_REPLICAS=2
    [[ -z $GRAFANA ]] || services+=(grafana)
    _monitored up --detach --no-build "${services[@]}" >"$WORK/up.log" 2>&1 \
        || fail "compose up with monitoring: $(tail -n 5 "$WORK/up.log")"
    PROMETHEUS=$(_monitored ps --quiet prometheus)
    cluster_answers 3
    await_figure 3 'sum(up{job="kvstore"})'
    cluster_put
    back=$(cluster_back)
    [[ $back == "$CLUSTER_PAGES" ]] || fail "$back of $CLUSTER_PAGES pages came back"
    await_figure $((2 * CLUSTER_PAGES)) 'sum(kvstore_ram_pages)'
    # A counter's first value is no rate yet.
    await_figure "*" "sum(kvstore_get_pages_total) >= $CLUSTER_PAGES"
    cluster_back >/dev/null
    await_figure "*" 'sum(rate(kvstore_get_pages_total{job="kvstore"}[5m])) > 0'
    step "Prometheus beside three nodes: all are scraped, and a dashboard's rates come of what was put and got"
    _check_confined
    [[ -z $(figures 'ALERTS{alertstate="firing"}') ]] || fail "an alert fires: $(figures ALERTS)"
    "$DOCKER" kill "$(_monitored ps --quiet n2)" >/dev/null
    await_figure 0 'up{instance="n2:7442"}'
    await_figure 1 'count(ALERTS{alertname="KVStoreNodeDown", alertstate="pending", instance="n2:7442"})'
    step "docker kill n2: Prometheus goes on asking for it, and its alert is pending; none had fired before"
    [[ -z $GRAFANA ]] || _check_grafana
    cluster_stop
}

_monitored() { cluster_compose --file docker/compose.monitoring.yaml "$@"; }

# figures EXPRESSION: what Prometheus answers, a line for each series.
figures() { "$DOCKER" exec "$PROMETHEUS" promtool query instant http://prometheus-web:9090 "$1" 2>"$WORK/query.log"; }

# await_figure VALUE EXPRESSION: until the answer is one series of this value; *: any.
await_figure() {
    local tries said=""
    for ((tries = 0; tries < 240; tries++)); do
        said=$(figures "$2") || true
        # shellcheck disable=SC2053  # a pattern
        if [[ $said != *$'\n'* && ${said#*=> } == $1\ @* ]]; then return; fi
        sleep 0.5
    done
    fail "$2 is not $1: $said $(cat "$WORK/query.log") $("$DOCKER" logs --tail 20 "$PROMETHEUS" 2>&1)"
}

# Its root can not be written, and who is in the nodes' network only does not reach it.
_check_confined() {
    local said
    for said in $("$DOCKER" inspect --format '{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}' "$PROMETHEUS"); do
        [[ $said == true || $said == "[ALL]" ]] || fail "Prometheus's container: $said"
    done
    [[ -z $("$DOCKER" port "$PROMETHEUS") ]] || fail "Prometheus is published: $("$DOCKER" port "$PROMETHEUS")"
    said=$(in_cluster python -c 'import socket
try:
    socket.create_connection(("prometheus", 9090), 20)
    print("answered")
except ConnectionRefusedError:
    print("refused")') || fail "a node does not find Prometheus's name"
    [[ $said == refused ]] || fail "Prometheus in the nodes' network: $said"
    step "Prometheus: root file system read-only, not published, refused in the nodes' network"
}

_check_grafana() {
    "$DOCKER" cp "$(_monitored ps --quiet grafana):/run/kvstore/admin.password" "$WORK/admin.password" >/dev/null \
        || fail "there is no password of Grafana's"
    python3 tests/docker/grafana.py "http://127.0.0.1:$GRAFANA_PORT" "$WORK/admin.password" deploy/monitoring/dashboard.json \
        || fail "Grafana: $("$DOCKER" logs --tail 20 "$(_monitored ps --quiet grafana)" 2>&1)"
    step "Grafana: strangers refused; it has the dashboard, and asks Prometheus"
}

# _image_of SERVICE: what docker/compose.monitoring.yaml runs.
_image_of() {
    _monitored config | python3 -c 'import re, sys
service = re.split(r"^  (\S+):\n", re.split(r"^services:\n", sys.stdin.read(), flags=re.M)[1], flags=re.M)
print(re.search(r"^    image: (\S+)", service[service.index(sys.argv[1]) + 1], re.M)[1])' "$1"
}

# Debian's Prometheus, as Prometheus's own image runs it.
_stand_in() {
    PROMETHEUS_IMAGE=$IMAGE-prometheus
    printf 'FROM %s\nRUN %s\nUSER nobody\nVOLUME /prometheus\nENTRYPOINT ["/bin/prometheus"]\n' "$base" \
        'install -d -o nobody -g nogroup /prometheus' >"$WORK/Dockerfile.prometheus"
    DOCKER_BUILDKIT=1 "$DOCKER" build ${BUILD_FLAGS[@]+"${BUILD_FLAGS[@]}"} --tag "$PROMETHEUS_IMAGE" - \
        <"$WORK/Dockerfile.prometheus" >"$WORK/prometheus.log" 2>&1 \
        || fail "the stand-in for Prometheus does not build: $(tail -n 5 "$WORK/prometheus.log")"
    step "the stand-in for $wanted: $("$DOCKER" run --rm --network none "$PROMETHEUS_IMAGE" --version 2>&1 | head -n 1)"
}
