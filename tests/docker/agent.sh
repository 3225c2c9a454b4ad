# shellcheck shell=bash
# What docker/agent.Dockerfile makes of an engine's image. Sourced by tests/docker/test.sh, whose functions and variables it uses.

# The engine is a stand-in: the base with a torch of its own, whatever else that has.
check_agent() {
    local base said
    base=$(daemon_image "$BASE" "$IMAGE-base")
    _engine torch 2.1.0+engine
    _with_agent || fail "the agent's image does not build: $(tail -n 25 "$WORK/agent.log")"
    said=$("$DOCKER" run --rm --network none --label "$PROJECT" --entrypoint python3 "$IMAGE-agent" -c '
import importlib.metadata, gpu_agent, gpu_agent.engines, kvstore
print(kvstore.__version__, importlib.metadata.version("torch"), importlib.metadata.version("grpcio") > "")') \
        || fail "the agent can not be imported in its image"
    [[ $said == *" 2.1.0+engine True" ]] || fail "in the agent's image: $said"
    step "an engine's image with the agent: $said; $(tail -n 1 <<<"$(grep -o 'added: .*' "$WORK/agent.log")")"
    _engine protobuf 3.0.0
    if _with_agent; then fail "the agent's image was built over an engine with protobuf 3.0.0"; fi
    grep -q "pip finds nothing that leaves the engine's packages as they are" "$WORK/agent.log" \
        || fail "an engine with protobuf 3.0.0: $(tail -n 25 "$WORK/agent.log")"
    step "an engine with protobuf 3.0.0: the image is not built, and protobuf stays as it is"
}

# _engine PACKAGE VERSION: an image of the base that says that it has it, and a torch that can be imported.
_engine() {
    local folder=$WORK/engine
    rm -rf "$folder"
    mkdir -p "$folder/$1-$2.dist-info" "$folder/torch"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$2" >"$folder/$1-$2.dist-info/METADATA"
    touch "$folder/$1-$2.dist-info/RECORD"
    echo 'import sys, unittest.mock; sys.modules[__name__] = unittest.mock.MagicMock()' >"$folder/torch/__init__.py"
    # shellcheck disable=SC2016  # python's, not the shell's
    printf 'FROM %s\nCOPY . /engine\nRUN %s\n' "$base" \
        'python3 -c "import shutil, site; shutil.copytree(\"/engine\", site.getsitepackages()[0], dirs_exist_ok=True)"' \
        >"$folder/Dockerfile"
    DOCKER_BUILDKIT=1 "$DOCKER" build ${BUILD_FLAGS[@]+"${BUILD_FLAGS[@]}"} --tag "$IMAGE-engine" "$folder" \
        >"$WORK/engine.log" 2>&1 || fail "the stand-in for an engine does not build: $(tail -n 5 "$WORK/engine.log")"
}

_with_agent() {
    local secret=()
    [[ -z ${PIP_CERT:-} ]] || secret=(--secret "id=ca,src=$PIP_CERT")
    DOCKER_BUILDKIT=1 "$DOCKER" build ${BUILD_FLAGS[@]+"${BUILD_FLAGS[@]}"} ${secret[@]+"${secret[@]}"} --progress plain \
        --build-arg "BASE=$base" --build-arg "ENGINE_IMAGE=$IMAGE-engine" --file docker/agent.Dockerfile \
        --tag "$IMAGE-agent" . >"$WORK/agent.log" 2>&1
}
