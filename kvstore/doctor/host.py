"""Check this host and this client's settings.

Of the host: kernel settings that a node, a client or an engine needs. Of the settings: the files
that they name, and their expiry.
"""

import ctypes
import mmap
import os
import platform
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvstore
from kvstore.config import PROTOCOL_VERSION, ClientConfig
from kvstore.doctor.checks import Finding, fail, ok, skipped, warn
from kvstore.errors import ConfigError, Unavailable
from kvstore.page_hmac import page_keys
from kvstore.security.certificates import NEAR_END_S, SYSTEM, date
from kvstore.security.secrets import token_of
from kvstore.transports.grpc_process import check_headroom
from kvstore.transports.tls import client_tls

MIB = 1 << 20
DESCRIPTORS_FEW = 4096  # a node uses one per connection, and two per extent of its disk
MEMORY_LOW_NBYTES = 512 << 20  # memory that a node needs beside its RAM tier
SHMEM_ENABLED = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
# Struct timex of 64-bit Linux, up to its status: modes, offset, freq, errors
_TIMEX = struct.Struct("@Ixxxxqqqqi")
_TIMEX_NBYTES = 256
_UNSYNCHRONISED = 0x40


def unsynchronised() -> bool | None:
    """Return whether the kernel reports that nothing sets its clock; None if unknown."""
    state = ctypes.create_string_buffer(_TIMEX_NBYTES)  # modes 0: read only
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return bool(_TIMEX.unpack_from(state)[-1] & _UNSYNCHRONISED)


class Host:
    """Findings on this host. `serves`: a node runs here, or is to.

    `has_gpu`: an agent moves pages of a GPU here. `root`: where the kernel's files are.
    """

    def __init__(
        self,
        serves: bool = False,
        has_gpu: bool = False,
        root: Path = Path("/"),
        clock: Callable[[], bool | None] = unsynchronised,
    ) -> None:
        self._serves = serves
        self._has_gpu = has_gpu
        self._root = root
        self._clock = clock

    def findings(self) -> Iterator[Finding]:
        """Yield a finding per property of the host."""
        for look in (
            self.versions,
            self.descriptors,
            self.memory,
            self.shared_memory,
            self.locked_memory,
            self.huge_pages,
            self.clock,
        ):
            yield look()

    def versions(self) -> Finding:
        """Check the versions of kvstore, Python and grpcio."""
        import importlib.metadata  # takes 30 ms

        try:
            grpc = importlib.metadata.version("grpcio")
        except importlib.metadata.PackageNotFoundError:
            grpc = "?"
        text = (
            f"kvstore {kvstore.__version__}, protocol {PROTOCOL_VERSION}, Python "
            f"{platform.python_version()}"
        )
        return ok("versions", f"{text}, grpcio {grpc}, {platform.system()} {platform.release()}")

    def descriptors(self) -> Finding:
        """Check the limit on open files."""
        soft, hard = self._limit("Max open files")
        text = f"{_count(soft)} open files a process, it may ask for {_count(hard)}"
        try:
            check_headroom()
        except Unavailable as error:
            return fail(
                "descriptors",
                f"{error}; gRPC would not begin",
                "raise it with ulimit, or LimitNOFILE of the unit",
            )
        if hard is not None and hard < DESCRIPTORS_FEW:
            return warn(
                "descriptors",
                text,
                f"raise the hard limit to {DESCRIPTORS_FEW:,} or more: LimitNOFILE, ulimit -Hn",
            )
        return ok("descriptors", text)

    def memory(self) -> Finding:
        """Check the free memory."""
        left = re.search(r"^MemAvailable:\s+(\d+) kB", self._read("proc/meminfo"), re.MULTILINE)
        if left is None:
            return skipped("memory", "this kernel does not tell what is available")
        nbytes = int(left[1]) * 1024
        text = f"{nbytes / MIB:,.0f} MiB available"
        cap = self._read("sys/fs/cgroup/memory.max").strip()
        if cap.isdigit():
            used = self._read("sys/fs/cgroup/memory.current").strip()
            inside = int(cap) - (int(used) if used.isdigit() else 0)
            text += (
                f", of which {max(0, inside) / MIB:,.0f} MiB under the limit of "
                f"{int(cap) / MIB:,.0f} MiB here"
            )
            nbytes = min(nbytes, inside)
        if nbytes < MEMORY_LOW_NBYTES:
            return warn(
                "memory",
                text,
                "a node needs RAM + RAM/64 + 512 MiB: lower --ram-bytes, or raise the limit",
            )
        return ok("memory", text)

    def shared_memory(self) -> Finding:
        """Check shared memory. An arena is a memfd, so the size of /dev/shm does not matter."""
        try:
            fd = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, MIB)
                mmap.mmap(fd, MIB).close()
            finally:
                os.close(fd)
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            remedy = (
                "Linux 5.3 or newer, and a seccomp profile that allows memfd_create and pidfd_open"
            )
            return fail("shared memory", f"not available: {error}", remedy)
        space, _ = self._limit("Max address space")
        if space is not None:
            remedy = (
                "ulimit -v unlimited (LimitAS): a client maps all of the RAM of the node on "
                "its host"
            )
            return warn("shared memory", f"a process may map {space / MIB:,.0f} MiB in all", remedy)
        return ok(
            "shared memory",
            "memfd and pidfd work, nothing limits what may be mapped; /dev/shm is not used",
        )

    def locked_memory(self) -> Finding:
        """Check the limit on locked memory."""
        soft, hard = self._limit("Max locked memory")
        if soft is None:
            return ok("locked memory", "unlimited")
        text = (
            f"{soft / MIB:,.3g} MiB a process, it may ask for "
            f"{'any' if hard is None else f'{hard / MIB:,.3g} MiB'}"
        )
        if self._has_gpu:
            remedy = (
                "if the log of the agent says `can not page-lock`: LimitMEMLOCK=infinity, or "
                "capability IPC_LOCK"
            )
            return warn("locked memory", text, remedy)
        return ok("locked memory", f"{text}; no node locks any")

    def huge_pages(self) -> Finding:
        """Check huge pages for shared memory."""
        text = self._read(SHMEM_ENABLED)
        chosen = re.search(r"\[(\w+)\]", text)
        if chosen is None:
            return skipped(
                "huge pages", f"this kernel has none for shared memory (/{SHMEM_ENABLED})"
            )
        if chosen[1] not in ("never", "deny"):
            return ok("huge pages", f"shared memory gets them: {chosen[1]}")
        text = f"shared memory gets none: {chosen[1]}"
        if not (self._serves or self._has_gpu):
            return ok("huge pages", f"{text}; they matter where a node runs")
        remedy = (
            f"as root, before the node starts and after each boot: echo advise > /{SHMEM_ENABLED}"
        )
        return warn(
            "huge pages",
            f"{text}: each client needs 75 ms and 2 MiB more for each GiB it maps",
            remedy,
        )

    def clock(self) -> Finding:
        """Check that the clock is synchronised."""
        nobody = self._clock()
        if nobody is None:
            return skipped("clock", "the kernel does not report a clock source")
        if nobody:
            remedy = (
                "run chrony or systemd-timesyncd; certificates and times to live go by the clock"
            )
            return warn(
                "clock",
                "nothing synchronises this host's clock, as far as the kernel knows",
                remedy,
            )
        return ok("clock", "it is synchronised")

    def _limit(self, name: str) -> tuple[int | None, int | None]:
        """Return this process's soft and hard limit; None for unlimited."""
        found = re.search(rf"^{name}\s+(\w+)\s+(\w+)", self._read("proc/self/limits"), re.MULTILINE)
        soft, hard = (
            int(text) if text.isdigit() else None
            for text in (found.groups() if found else ("", ""))
        )
        return soft, hard

    def _read(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError:
            return ""


def findings(config: ClientConfig) -> Iterator[Finding]:
    """Yield findings on the client's settings."""
    yield _address(config)
    yield from _files(config)
    yield _token(config)
    if config.page_key or config.page_key_file:
        yield _page_key(config)


def check_expiry(name: str, what: str, seconds: float) -> Finding:
    """Warn if something expires soon or has expired; `seconds` is Unix time."""
    left_s = seconds - time.time()
    text = f"{what} until {date(seconds)}"
    if left_s <= 0:
        return fail(
            name,
            f"{what} has expired on {date(seconds)}",
            "renew it: write new files in place of the old ones",
        )
    if left_s < NEAR_END_S:
        return warn(
            name,
            f"{text}, {left_s / 86400:.1f} days from now",
            "renew it: new files in place of the old ones",
        )
    return ok(name, f"{text}, {left_s / 86400:,.0f} days from now")


def _address(config: ClientConfig) -> Finding:
    direct = ", that node alone" if config.direct else ""
    near = "" if config.near == "auto" else f", near {config.near}"
    text = f"{config.address}{direct}, wire {config.wire}{near}"
    return ok(
        "settings",
        f"{text}, {config.timeout_s:g} s a call, {config.connect_timeout_s:g} s to connect",
    )


def _files(config: ClientConfig) -> Iterator[Finding]:
    tls = client_tls(config, "")
    if tls is None:
        yield ok("TLS files", "none: this client does not use TLS")
        return
    from kvstore.security import x509

    try:
        pems = tls.files.poll()
        roots_end = 0.0 if config.tls_ca == SYSTEM else x509.first_expiry(pems.roots)
    except ConfigError as error:
        yield fail(
            "TLS files",
            str(error),
            "KVSTORE_TLS_CA, KVSTORE_TLS_CERT and KVSTORE_TLS_KEY name them",
        )
        return
    if roots_end:
        yield check_expiry("TLS files", f"tls_ca={config.tls_ca}", roots_end)
    else:
        yield ok("TLS files", "the authorities that this host trusts")
    if pems.chain:
        yield _own_certificate(f"tls_cert={config.tls_cert}", pems.chain)


def _own_certificate(file: str, pem: bytes) -> Finding:
    from kvstore.security import x509

    try:
        x509.check_dates(file, pem)
    except ConfigError as error:
        remedy = "kvstore certs client NAME --force makes a new one, if the authority is ours"
        return fail("own certificate", str(error), remedy)
    return check_expiry("own certificate", file, x509.validity(pem)[1])


def _token(config: ClientConfig) -> Finding:
    try:
        token = token_of(config)
    except ConfigError as error:
        return fail(
            "token",
            str(error),
            "KVSTORE_TOKEN_FILE names a file with one word that others can not read",
        )
    if config.token_file and not token:
        return fail(
            "token",
            f"token_file={config.token_file} is empty",
            "write the token into it: kvstore tokens add",
        )
    source = f"from {config.token_file}" if config.token_file else "from KVSTORE_TOKEN"
    return ok("token", f"set, {source}" if token else "none")


def _page_key(config: ClientConfig) -> Finding:
    try:
        keys = page_keys(config)
    except ConfigError as error:
        return fail("page key", str(error), "KVSTORE_PAGE_KEY_FILE names a file with 64 hex digits")
    assert keys is not None
    return ok("page key", f"{keys.key_id}: engines with another one find none of its pages")


def _count(number: int | None) -> str:
    return "any number" if number is None else f"{number:,}"
