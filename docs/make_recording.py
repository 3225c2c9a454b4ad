"""Record the README's quickstart in a terminal, and draw it as docs/pictures/quickstart.svg.

Starts a node, runs the commands in a pseudo-terminal of 100 columns, and exports their output. Run
it after their output has changed: `python docs/make_recording.py`.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvstore.tools.node_process import NodeProcess

PICTURE = Path(__file__).parent / "pictures" / "quickstart.svg"
COLUMNS, LINES = 100, 40
COMMANDS = (
    "head -c 65536 /dev/urandom > page.bin",
    "kvstore put --create-opaque my-test --tokens 1 page.bin",
    "kvstore get --model my-test --tokens 1 -o back.bin && cmp page.bin back.bin",
    "kvstore lookup --model my-test --tokens 1",
    "kvstore status",
)


def output_of(command: str, folder: Path, address: str) -> str:
    """Run a shell command in a pseudo-terminal and return its output with colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "TERM": "xterm-256color", "KVSTORE_ADDRESS": address}
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    read = bytearray()
    while True:
        try:
            read += os.read(ours, 65536)
        except OSError:  # the last process has closed the terminal
            break
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command}: status {process.returncode}\n{read.decode()}")
    return read.decode().replace("\r\n", "\n")


def main() -> None:
    """Record the commands and write the picture."""
    screen = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder, NodeProcess("--ram-bytes", "1GiB") as node:
        for command in COMMANDS:
            screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            shown = output_of(command, Path(folder), node.address)
            screen.print(Text.from_ansi(shown.replace(folder, ".")), end="")
    picture = screen.export_svg(title="kvstore quickstart")
    # Without the fonts that rich loads from elsewhere: a reader's own monospace font is used.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
