"""Gather what a node needs at run time into a directory that becomes the image.

    python3 docker/runtime.py /opt/kvstore /runtime

It copies the interpreter, the standard library, the environment and the shared libraries that these
are linked with. There is no shell, package manager, compiler or pip in the image. It runs in the
build stage, which has `ldd`. Two runs write the same bytes: byte code is identified by its source's
hash, and all files have the time SOURCE_DATE_EPOCH.
"""

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode

# Parts of the standard library to leave out: installers, windows, tests, editors, and byte code
# with times in it.
LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "site-packages",
    "dist-packages",
)
LEFT_OUT += ("config-*", "_tkinter*", "__pycache__")
# Libraries that are opened by name: glibc's, for ending threads and for host names.
BY_NAME = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
# Files for name resolution, the linker, users, and the authorities that TLS trusts.
FILES = (
    "/etc/nsswitch.conf",
    "/etc/ld.so.cache",
    "/etc/passwd",
    "/etc/group",
    "/etc/ssl/certs/ca-certificates.crt",
)

BUILT_S = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)


def main(environment: Path, target: Path) -> None:
    """Run the command line."""
    library = Path(sysconfig.get_path("stdlib"))
    interpreter = Path(sys.executable).resolve()
    _copy_tree(environment, target, ("__pycache__",))
    _copy_tree(library, target, LEFT_OUT)
    for folder in (environment, library):  # compiled now: the root file system is read-only later
        compileall.compile_dir(
            target / folder.relative_to("/"),
            quiet=2,
            stripdir=str(target),
            # sources in the image do not change
            invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
        )
    for path in _interpreters(environment, interpreter):
        _copy(path, target)
    for path in [interpreter, *_elf(environment), *_elf(target / library.relative_to("/"))]:
        for linked in _linked(path):
            _copy(linked, target)
    for name in (*_by_name(), *FILES):
        if Path(name).exists():
            _copy(Path(name), target)
    for name, mode in (
        ("tmp", 0o1777),
        ("proc", 0o555),
        ("sys", 0o555),
        ("dev", 0o755),
        ("etc", 0o755),
    ):
        (target / name).mkdir(exist_ok=True)
        (target / name).chmod(mode)
    for path in [*target.rglob("*"), target]:
        os.utime(path, (BUILT_S, BUILT_S), follow_symlinks=False)


def _interpreters(environment: Path, interpreter: Path) -> Iterator[Path]:
    """Yield the interpreter and each link on the way to it."""
    path = environment / "bin" / "python"
    while path.is_symlink():
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        if not path.is_relative_to(environment):
            yield path
    yield interpreter


def _elf(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*.so*") if path.is_file() and not path.is_symlink())


def _linked(path: Path) -> Iterator[Path]:
    """Yield the shared libraries of a file, as this system finds them.

    One that is part of a package has been copied with it.
    """
    said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    for line in said.splitlines():
        found = line.split("=>")[-1].split("(")[0].strip()
        if found.startswith("/"):
            yield Path(found)
        elif "not found" in line:
            sys.exit(f"{path} needs {line.strip()}")


def _by_name() -> Iterator[str]:
    said = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        if line.split(" ", 1)[0].strip() in BY_NAME:
            yield line.split("=>")[-1].strip()


def _copy(path: Path, target: Path) -> None:
    """Copy a file under its own name, and the targets of its links."""
    place = target / path.relative_to("/")
    if place.exists() or place.is_symlink():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        place.symlink_to(os.readlink(path))
        _copy(Path(os.path.normpath(path.parent / os.readlink(path))), target)
    else:
        shutil.copy2(path, place)


def _copy_tree(folder: Path, target: Path, left_out: tuple[str, ...]) -> None:
    place = target / folder.relative_to("/")
    shutil.copytree(
        folder, place, symlinks=True, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
