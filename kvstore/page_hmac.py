"""Sign pages with HMACs, so that a node cannot forge them.

A keyed namespace's page is stored with a MAC for each part.

    stored page  | part 0 | part 1 | ... | last part | MAC 0 | MAC 1 | ... | last MAC |
                 |<--------- page_nbytes ----------->|<-------- hmac_nbytes --------->|

    secret --+-- key id: part of the namespace; identifies the secret without revealing it
             +-- namespace digest --> its key --+-- prefix hash, number of the part, bytes --> MAC

Only the engines know the secret. A node stores and checks such a page like any other, MACs
included. Only a holder of the secret can detect a page that was forged, changed, or moved from
another key. Byte-exact: docs/FORMAT.md, "Page HMAC".
"""

import hmac
import stat
import struct
from collections.abc import Iterable, Sequence

from kvstore.buffers import Pieces, chunks
from kvstore.checksum import cuts, parts_of
from kvstore.config import PageKeyConfig
from kvstore.errors import ConfigError
from kvstore.security.secrets import SECRET_NBYTES_MAX, read_guarded

SECRET_NBYTES = 32
MAC_NBYTES = 16
_KEY_ID_NBYTES = 8
_EVERYBODY = stat.S_IROTH | stat.S_IWOTH  # mode bits that the secret's file must not have


def hmac_nbytes(page_nbytes: int) -> int:
    """Return the bytes of all HMACs of a page."""
    return MAC_NBYTES * len(cuts(page_nbytes))


class PageKeys:
    """The keys derived from one secret, one for each namespace.

    `key_id`: 16 hex digits.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_NBYTES:
            raise ConfigError(f"a page key has {SECRET_NBYTES} bytes, this one {len(secret)}")
        self._secret = secret
        self.key_id = _hmac(secret, b"kvstore-page-key-id-1\0")[:_KEY_ID_NBYTES].hex()

    def key_for(self, digest: bytes) -> bytes:
        """Return the key of the namespace with this digest."""
        return _hmac(self._secret, b"kvstore-page-key-1\0" + digest)


class PageHmacs:
    """HMACs of the pages of one call: made where pages are sent, verified where they arrive.

    Thread-safe.

    `nbytes`: bytes of all HMACs of a page. `forged`: prefix hashes of pages that arrived without a
    valid HMAC of this key; some perhaps twice. `numbers`: the parts of each page that arrive, by
    default all.
    """

    def __init__(self, key: bytes, page_nbytes: int, numbers: Sequence[int] | None = None) -> None:
        self._begun = hmac.new(key, b"kvstore-page-seal-1\0", "sha256")
        self._cuts = cuts(page_nbytes)
        self._numbers = range(len(self._cuts)) if numbers is None else numbers
        self.nbytes = hmac_nbytes(page_nbytes)
        self.forged: list[bytes] = []

    def sign(self, prefix_hash: bytes, page: Pieces) -> memoryview:
        """Return the HMACs of a whole page."""
        parts = enumerate(chunks(page, [end - start for start, end in self._cuts]))
        return memoryview(
            b"".join([self._mac(prefix_hash, number, part) for number, part in parts])
        )

    def verify(self, prefix_hash: bytes, arrived: Pieces, page_hmac: memoryview) -> bool:
        """Return whether the parts carry this key's HMACs for this page; count failures.

        `arrived` holds the parts in order.
        """
        sizes = [end - start for start, end in (self._cuts[number] for number in self._numbers)]
        for number, part in zip(self._numbers, chunks(arrived, sizes), strict=True):
            mac = page_hmac[MAC_NBYTES * number : MAC_NBYTES * (number + 1)]
            if not hmac.compare_digest(mac, self._mac(prefix_hash, number, part)):
                self.forged.append(prefix_hash)
                return False
        return True

    def _mac(self, prefix_hash: bytes, number: int, part: Iterable[memoryview]) -> bytes:
        """Return the HMAC of one part; hashlib releases the GIL from 2 KiB on."""
        running = self._begun.copy()
        running.update(
            struct.pack("<I", len(prefix_hash))
            + prefix_hash
            + struct.pack("<II", number, len(self._cuts))
        )
        for piece in part:
            running.update(piece)
        return running.digest()[:MAC_NBYTES]


def with_hmacs(page: Pieces, prefix_hash: bytes, hmacs: PageHmacs | None) -> Pieces:
    """Return what is stored of a page: its bytes and, in a keyed namespace, its new HMACs."""
    return page if hmacs is None else (*page, hmacs.sign(prefix_hash, page))


def receive_buffers(page: Pieces, hmacs: PageHmacs | None) -> Pieces:
    """Return the buffers for a stored page: the caller's, and one for the HMACs."""
    return page if hmacs is None else (*page, memoryview(bytearray(hmacs.nbytes)))


class SignedRanges:
    """Locate ranges of a signed page in the parts that must be read to verify them. No I/O.

    Ranges are (offset, nbytes). Whole parts must arrive to be verified.

        page        | 0 | 1 | 2 | 3 | 4 |     ranges lie in 1, 3 and 4
        runs            | 1 |   | 3 | 4 |     arrive one after the other: `nbytes`
    """

    def __init__(self, page_nbytes: int, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = list(ranges)
        self.numbers = sorted(parts_of(page_nbytes, self._ranges))
        self.runs: list[tuple[int, int]] = []  # (offset, nbytes)
        # Of each part: the offset of its first byte in the bytes that arrive
        at, self.nbytes = dict[int, int](), 0
        for number in self.numbers:
            start, end = cuts(page_nbytes)[number]
            at[number], self.nbytes = self.nbytes, self.nbytes + end - start
            if self.runs and sum(self.runs[-1]) == start:
                start = self.runs.pop()[0]
            self.runs.append((start, end - start))
        firsts = [min(parts_of(page_nbytes, [(offset, 1)])) for offset, _ in self._ranges]
        self._places = [
            at[first] + offset - cuts(page_nbytes)[first][0]
            for first, (offset, _) in zip(firsts, self._ranges, strict=True)
        ]

    def pick(self, parts: memoryview) -> Iterable[memoryview]:
        """Return the ranges from the parts of a page that arrived."""
        return [
            parts[place : place + nbytes]
            for place, (_, nbytes) in zip(self._places, self._ranges, strict=True)
        ]


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def page_keys(config: PageKeyConfig) -> PageKeys | None:
    """Return the keys made from the configured secret; None if none is configured.

    Raises ConfigError, which contains no part of the secret.
    """
    if config.page_key and config.page_key_file:
        raise ConfigError("page_key and page_key_file are both set; leave one of them out")
    if config.page_key_file:
        file = f"page_key_file={config.page_key_file}"
        content = read_guarded(file, _EVERYBODY, SECRET_NBYTES_MAX)
        return _parsed(content.decode("ascii", "replace"), f"the file {file}")
    return _parsed(config.page_key, "page_key") if config.page_key else None


def _parsed(text: str, where: str) -> PageKeys:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise ConfigError(
            f"{where} does not hold {2 * SECRET_NBYTES} hex digits; make some with: openssl rand "
            "-hex 32"
        )
    return PageKeys(secret)
