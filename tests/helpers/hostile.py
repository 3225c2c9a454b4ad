"""Run pytest with hostile settings of the machine, user and shell (`make test-hostile`).

    python tests/helpers/hostile.py --umask 000 ARGUMENTS OF PYTEST

The working directory is not the project's and not writable, and pip and git find configuration in
all their places. All tests must pass, because tests/helpers/hermetic.py isolates them.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:1"
GIT_CONFIG = """[commit]
gpgsign = true
[tag]
gpgsign = true
[gpg]
program = /bin/false
[core]
autocrlf = true
fileMode = false
quotePath = true
hooksPath = {hooks}
[init]
defaultBranch = haupt
templateDir = {hooks}
[log]
showSignature = true
[color]
ui = always
"""
PIP_CONFIG = f"""[global]
index-url = {NOWHERE}
constraint = {{constraints}}
require-virtualenv = true
user = true
no-binary = :all:
"""
HOOKS = (
    "pre-commit",
    "post-checkout",
    "post-commit",
    "commit-msg",
    "pre-push",
    "post-index-change",
)
VARIABLES = {
    "COLUMNS": "20",
    "LINES": "5",
    "NO_COLOR": "1",
    "FORCE_COLOR": "1",
    "TERM": "dumb",
    "CI": "1",
    "GITHUB_ACTIONS": "true",
    "TZ": "Pacific/Apia",
    "LANGUAGE": "tr",
    "PAGER": "/bin/false",
    "MPLBACKEND": "none_of_matplotlibs",
    "HF_HUB_CACHE": "/nowhere/hub",
    "GRPC_VERBOSITY": "DEBUG",
    "SSL_CERT_FILE": "/nowhere/roots.pem",
    "SSL_CERT_DIR": "/nowhere",
    "GIT_DIR": "/nowhere/.git",
    "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.autocrlf",
    "GIT_CONFIG_VALUE_0": "true",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_SDK_DISABLED": "true",
    "OTEL_TRACES_SAMPLER": "always_off",
    "OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE,
    "PIP_INDEX_URL": NOWHERE,
    "PIP_NO_BINARY": ":all:",
    "PIP_REQUIRE_VIRTUALENV": "true",
    "PIP_TARGET": "/nowhere/packages",
    "PYTHONWARNINGS": "error",
    "PYTHONIOENCODING": "latin-1",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONDEVMODE": "1",
    "PYTHONHASHSEED": "1",
    "PYTHONPROFILEIMPORTTIME": "",
    "KVSTORE_ADDRESS": "127.0.0.1:1",
    "KVSTORE_TOKEN": "a-strangers-token",
    "KVSTORE_TENANT": "strangers",
    "KVSTORE_MODEL": "another",
    "KVSTORE_SALT": "a strangers salt",
    "KVSTORE_WIRE": "grpc",
    "KVSTORE_TIMEOUT_S": "0.001",
    "KVSTORE_TLS_CA": "/nowhere/ca.pem",
    "KVSTORE_RAM_BYTES": "64KiB",
    "KVSTORE_DATA_DIR": "/nowhere/data",
    "KVSTORE_PORT": "1",
    "KVSTORE_LOG_LEVEL": "CRITICAL",
    **dict.fromkeys(
        ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
        NOWHERE,
    ),
}
# Locales with other case rules, decimal commas or encodings. The first available one is used.
LOCALES = ("tr_TR.iso88599", "tr_TR.utf8", "de_DE.iso88591", "de_DE.utf8")


def locale_name() -> str:
    listed = subprocess.run(
        ["locale", "-a"], capture_output=True, text=True, check=False
    ).stdout.split()
    return next((name for name in LOCALES if name in listed), "POSIX")


def environment(place: Path) -> dict[str, str]:
    """Write a hostile user's configuration under `place` and return the shell's variables."""
    home, hooks, constraints = place / "home", place / "hooks", place / "constraints.txt"
    for folder in (
        home / ".pip",
        home / ".config" / "pip",
        home / ".config" / "git",
        place / "xdg" / "pip",
        hooks,
    ):
        folder.mkdir(parents=True)
    for hook in HOOKS:
        (hooks / hook).write_text("#!/bin/sh\necho the hook of a user >&2\nexit 1\n")
        (hooks / hook).chmod(0o755)
    constraints.write_text("torch<=2.0\ngrpcio<1\nnewcomer<0.1\n")
    for folder in (home / ".pip", home / ".config" / "pip", place / "xdg" / "pip"):
        (folder / "pip.conf").write_text(PIP_CONFIG.format(constraints=constraints))
    for path in (home / ".gitconfig", home / ".config" / "git" / "config"):
        path.write_text(GIT_CONFIG.format(hooks=hooks))
    name = locale_name()
    kept = {
        key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if key in os.environ
    }
    paths = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CONFIG_DIRS": str(place / "xdg"),
        "XDG_CACHE_HOME": "/nowhere/cache",
        "XDG_DATA_HOME": "/nowhere/share",
        "XDG_RUNTIME_DIR": "/nowhere/run",
        "PIP_CONSTRAINT": str(constraints),
        "PIP_CONFIG_FILE": str(home / ".pip" / "pip.conf"),
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
        "GIT_CONFIG_SYSTEM": str(home / ".gitconfig"),
        "GIT_TEMPLATE_DIR": str(hooks),
        "KVSTORE_HOSTILE": "1",  # the inner run starts no further one
    }
    return {**kept, **VARIABLES, **paths, "LANG": name, "LC_ALL": name}


def run(
    arguments: list[str], umask: int, place: Path, **options: object
) -> "subprocess.CompletedProcess[str]":
    """Run pytest in the hostile environment; `options` go to subprocess.run."""
    elsewhere = place / "cwd"
    elsewhere.mkdir()
    variables = environment(place)
    elsewhere.chmod(0o555)

    def as_a_daemon() -> None:
        os.umask(umask)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        *arguments,
    ]
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command,
        cwd=elsewhere,
        env=variables,
        preexec_fn=as_a_daemon,
        text=True,
        check=False,
        **options,
    )


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--umask", type=lambda text: int(text, 8), default=0o077)
    known, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-hostile-") as place:
        return run(arguments, known.umask, Path(place)).returncode


if __name__ == "__main__":
    sys.exit(main())
