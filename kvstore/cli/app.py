"""Start the `kvstore` command.

Importable without the `cli` extra, to say what is missing.
"""

import sys

from kvstore.config import quiet_grpc

EXTRA_MODULES = ("typer", "rich", "click", "shellingham")


def main() -> None:
    """Run the command line; name the extra to install if a package is missing."""
    quiet_grpc()
    try:
        from kvstore.cli.commands import build
        from kvstore.cli.output import guard_stdout
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA_MODULES:
            raise
        sys.exit(_missing(error.name))
    guard_stdout()
    build(only=sys.argv[1] if len(sys.argv) > 1 else "")(prog_name="kvstore")


def _missing(module: str) -> int:
    print(f"kvstore: {module} is not installed; pip install 'kvstore-llm[cli]'", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
