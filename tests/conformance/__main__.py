"""Test a KV connector of vLLM: does restored KV give the answers that computed KV gives?

    python conformance CONFIGURATION [--models llama,sliding] [--cases "full hit"] [--json]
    python conformance --self-test
    python conformance --list

CONFIGURATION is a file with a kv_transfer_config, or the name of one in configurations/. README.md
explains cases and outcomes. Exit status: 0 right, 1 something was wrong or died, 2 wrong usage,
3 nothing was restored at all.
"""

import argparse
import contextlib
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases
import self_test
from configuration import Configuration, ConfigurationError, Store, StoreFailed, load
from engine_control import EngineDied, Spawner, last_error, last_line
from outcomes import HEADER, MEANINGS, Outcome, as_json, matrix, status
from plan import MODELS, OWN, Runner
from progress import telling

HERE = Path(__file__).resolve().parent
SHIPPED = HERE / "configurations"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "configuration", nargs="?", help="a file, or a name: " + ", ".join(shipped())
    )
    found.add_argument("--models", help="names, separated by commas; default: all")
    found.add_argument("--cases", help="names, separated by commas; default: all")
    found.add_argument("--own", metavar="JSON", help="arguments of vllm.LLM, with a model of yours")
    found.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    found.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    found.add_argument("--matrix", action="store_true", help="print a Markdown table at the end")
    found.add_argument("--fresh", action="store_true", help="start engines without forking: slower")
    found.add_argument("--keep", help="a folder for logs and models; default: a temporary one")
    found.add_argument("--self-test", action="store_true", help="test the suite itself by lies")
    found.add_argument("--list", action="store_true", help="list models, cases and outcomes")
    return found


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def listing() -> str:
    lines = ["cases:"]
    lines += [f"  {name:<17} {function.__doc__}" for name, function in cases.CASES.items()]
    lines += ["models:"]
    lines += [
        f"  {name:<17} {len(model.cases)} cases{'; GPU only' if model.gpu_only else ''}"
        for name, model in MODELS.items()
        if name != OWN
    ]
    lines += ["outcomes:"]
    lines += [f"  {name:<17} {meaning}" for name, meaning in MEANINGS.items()]
    lines += ["configurations:"]
    lines += [f"  {name:<17} {load(SHIPPED / f'{name}.json').description}" for name in shipped()]
    return "\n".join(lines)


def chosen(given: str | None, known: Sequence[str], kind: str) -> list[str]:
    """Return the names of an option. Raises ConfigurationError if one is unknown."""
    names = [name.strip() for name in given.split(",")] if given else list(known)
    for name in names:
        if name not in known:
            raise ConfigurationError(f"there is no {kind} {name!r}; there are: {', '.join(known)}")
    return names


def own_arguments(given: str | None) -> dict[str, Any]:
    """Return the value of --own. Raises ConfigurationError."""
    try:
        found = json.loads(given) if given else {}
    except ValueError as error:
        raise ConfigurationError(f"--own is no JSON: {error}") from error
    if not isinstance(found, dict) or (found and "model" not in found):
        raise ConfigurationError('--own names no model; write --own \'{"model": "PATH"}\'')
    return found


def configuration_of(name: str | None) -> Configuration:
    if not name:
        raise ConfigurationError(
            f"name a file with a kv_transfer_config, or one of: {', '.join(shipped())}"
        )
    return load(SHIPPED / f"{name}.json" if name in shipped() else Path(name))


def lacking(configuration: Configuration, python: str, device: str) -> str:
    """Return what this machine lacks for a configuration, or nothing."""
    if configuration.device and configuration.device != device:
        return f"{configuration.name} needs {configuration.device}, and vLLM runs on {device}"
    missing = [name for name in configuration.modules if not importlib.util.find_spec(name)]
    if missing and python == sys.executable:
        return f"{configuration.name} needs {', '.join(missing)}, which is not installed"
    return ""


def run(
    arguments: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> tuple[list[Outcome], dict[str, object]]:
    """Run what was asked for. Raises ConfigurationError, EngineDied and StoreFailed."""
    lies = arguments.self_test
    configuration = self_test.HONEST if lies else configuration_of(arguments.configuration)
    own = own_arguments(arguments.own)
    tiny = [name for name in MODELS if name != OWN]
    models = [OWN] if own else chosen(arguments.models, tiny, "model")
    wanted = chosen(arguments.cases, list(cases.CASES), "case")
    store = Store(configuration, folder, arguments.python)
    outcomes: list[Outcome] = []
    stack.enter_context(telling(lambda: f"{store.used_for}; {newest_log(folder, last_line)}"))
    spawner = Spawner(arguments.python, folder, store.environment, arguments.fresh)
    try:
        if why := lacking(configuration, arguments.python, spawner.facts["device"]):
            raise ConfigurationError(why)
        store.used_for = "the start of the store"
        store.start()
        runner = Runner(spawner, store, models, wanted, own)
        found: Iterator[Outcome] = runner.run()
        if lies:
            found = self_test.run(runner, self_test.models(runner, arguments.models), store)
        say = not arguments.json
        if say:
            print(HEADER, flush=True)
        for outcome in found:
            outcomes.append(outcome)
            if say:
                print(outcome.line(), flush=True)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            f" in {store.used_for}; {newest_log(folder, last_error)}"
        ) from error
    finally:
        store.kill()
        spawner.close()
    return outcomes, {"configuration": configuration.name, **spawner.facts}


def newest_log(folder: Path, line: Callable[[Path], str]) -> str:
    """Return the name and a line of the log that was written last."""
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    return f"{logs[-1].name}: {line(logs[-1])}" if logs else "no log"


def main(given: Sequence[str]) -> int:
    arguments = parser().parse_args(given)
    if arguments.list:
        print(listing())
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends engines and the store, too
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if arguments.keep:
            folder = Path(arguments.keep).resolve()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        try:
            outcomes, facts = run(arguments, folder, stack)
        except KeyboardInterrupt as error:
            print(f"conformance: interrupted{error}", file=sys.stderr)
            return 130
        except (ConfigurationError, EngineDied, StoreFailed) as error:
            if arguments.json:
                print(json.dumps({"error": str(error), "status": 2}))
            print(f"conformance: {error}", file=sys.stderr)
            return 2
    facts["seconds"] = round(time.monotonic() - start, 1)
    if arguments.json:
        print(as_json(outcomes, facts))
    else:
        if arguments.matrix:
            print("\n" + "\n".join(matrix(outcomes)))
        counts = [
            f"{sum(one.outcome == name for one in outcomes)} {name}"
            for name in MEANINGS
            if any(one.outcome == name for one in outcomes)
        ]
        print(
            f"\n{facts['configuration']}, vLLM {facts['vllm']} on {facts['device']}, "
            f"{facts['seconds']:.0f} s: {', '.join(counts)}"
        )
    return status(outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
