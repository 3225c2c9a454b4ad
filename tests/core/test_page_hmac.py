"""Page HMACs, the secret that makes them, and ranges of signed pages, without a node."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import ClientConfig, ConfigError, Keep, Namespace, opaque_layout
from kvstore.checksum import cuts
from kvstore.page_hmac import MAC_NBYTES, PageHmacs, PageKeys, SignedRanges, hmac_nbytes, page_keys

SECRET = bytes(range(32))
KEY, HASH = b"k" * 32, b"h" * 32


@pytest.fixture(autouse=True)
def _small_leaves(small_leaves: None) -> None:
    """Use parts of 256 bytes."""


def content(nbytes: int) -> memoryview:
    return memoryview(random.Random(nbytes).randbytes(nbytes))


@pytest.mark.parametrize("nbytes", [1, 255, 256, 511, 512, 1000, 256 * 64, 256 * 65])
def test_page_has_a_mac_per_part_and_matches_only_its_page(nbytes: int) -> None:
    hmacs, page = PageHmacs(KEY, nbytes), content(nbytes)
    mac = hmacs.sign(HASH, (page,))
    assert mac.nbytes == hmacs.nbytes == hmac_nbytes(nbytes) == MAC_NBYTES * len(cuts(nbytes))
    assert hmacs.verify(HASH, (page,), mac)
    assert hmacs.forged == []
    for place in {0, nbytes // 2, nbytes - 1}:
        other = bytearray(page)
        other[place] ^= 1
        assert not hmacs.verify(HASH, (memoryview(other),), mac)
    for place in range(mac.nbytes):
        other = bytearray(mac)
        other[place] ^= 1
        assert not hmacs.verify(HASH, (page,), memoryview(other))
    assert not hmacs.verify(HASH[:-1], (page,), mac)
    assert not hmacs.verify(HASH, (page,), mac[: mac.nbytes - 1])
    assert not hmacs.verify(HASH, (page,), memoryview(bytes(mac.nbytes)))
    assert not PageHmacs(b"l" * 32, nbytes).verify(HASH, (page,), mac)
    assert set(hmacs.forged) == {HASH, HASH[:-1]}


def test_parts_swapped_with_their_macs_do_not_match() -> None:
    hmacs, page = PageHmacs(KEY, 512), content(512)
    mac = hmacs.sign(HASH, (page,))
    swapped = memoryview(bytes(page[256:]) + bytes(page[:256]))
    assert not hmacs.verify(HASH, (swapped,), memoryview(bytes(mac[16:]) + bytes(mac[:16])))
    zeros = memoryview(bytes(512))  # equal parts have different MACs
    made = hmacs.sign(HASH, (zeros,))
    assert made[:16] != made[16:]


def test_part_of_a_longer_page_is_no_valid_page() -> None:
    long, page = PageHmacs(KEY, 768), content(768)
    mac = long.sign(HASH, (page,))
    assert not PageHmacs(KEY, 256).verify(HASH, (page[:256],), mac[:16])


def test_parts_are_checked_alone() -> None:
    nbytes = 5 * 256 + 7
    page, mac = content(nbytes), PageHmacs(KEY, nbytes).sign(HASH, (content(nbytes),))
    some = PageHmacs(KEY, nbytes, [1, 4])
    assert some.verify(HASH, (memoryview(bytes(page[256:512]) + bytes(page[1024:])),), mac)
    assert not some.verify(HASH, (memoryview(bytes(page[:256]) + bytes(page[1024:])),), mac)
    assert not some.verify(HASH, (memoryview(bytes(page[256:512]) + bytes(page[1023:-1])),), mac)


def test_ranges_are_found_in_received_parts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        page = content(rng.randrange(1, 256 * 70))
        edges = sorted(
            rng.sample(
                range(page.nbytes + 1), min(2 * rng.randrange(1, 5), (page.nbytes + 1) // 2 * 2)
            )
        )
        ranges = [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        rng.shuffle(ranges)
        signed = SignedRanges(page.nbytes, ranges)
        arrived = memoryview(
            b"".join(page[offset : offset + nbytes] for offset, nbytes in signed.runs)
        )
        assert arrived.nbytes == signed.nbytes == sum(nbytes for _, nbytes in signed.runs)
        assert [bytes(some) for some in signed.pick(arrived)] == [
            bytes(page[a : a + n]) for a, n in ranges
        ]
        hmacs = PageHmacs(KEY, page.nbytes, signed.numbers)
        assert hmacs.verify(HASH, (arrived,), PageHmacs(KEY, page.nbytes).sign(HASH, (page,)))


def test_other_threads_run_while_a_page_is_signed(
    others_run: Callable[[Callable[[], object]], bool],
) -> None:
    page = memoryview(bytes(4 << 20))
    hmacs = PageHmacs(KEY, page.nbytes)
    assert others_run(lambda: hmacs.sign(HASH, (page,)))


def test_namespace_keys_differ_and_the_key_id_hides_the_secret() -> None:
    keys, others = PageKeys(SECRET), PageKeys(SECRET[::-1])
    assert (
        len({keys.key_for(b"a" * 16), keys.key_for(b"b" * 16), others.key_for(b"a" * 16), SECRET})
        == 4
    )
    assert keys.key_id != others.key_id
    assert keys.key_id not in SECRET.hex()
    with pytest.raises(ConfigError, match="32 bytes, this one 31"):
        PageKeys(SECRET[1:])


def test_stored_page_includes_its_hmacs() -> None:
    plain = Namespace("m", opaque_layout(1000))
    keyed = Namespace("m", opaque_layout(1000), key_id=PageKeys(SECRET).key_id)
    other = Namespace("m", opaque_layout(1000), key_id=PageKeys(SECRET[::-1]).key_id)
    assert (plain.stored_nbytes, keyed.stored_nbytes) == (1000, 1000 + 3 * 16)
    assert len({plain.digest, keyed.digest, other.digest}) == 3


# ---- the secret ------------------------------------------------------------------------------


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "pages.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_key_file_and_variable_give_the_same_key(tmp_path: Path) -> None:
    assert page_keys(ClientConfig()) is None
    of_file = page_keys(ClientConfig(page_key_file=key_file(tmp_path, SECRET.hex() + "\n", 0o640)))
    of_variable = page_keys(ClientConfig(page_key=SECRET.hex()))
    assert of_file is not None
    assert of_variable is not None
    assert of_file.key_id == of_variable.key_id == PageKeys(SECRET).key_id


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "0" * 5000, "é" * 64])
def test_invalid_secret_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"pages\.key (does not hold 64 hex digits|has more than 4096)"
    ) as refused:
        page_keys(ClientConfig(page_key_file=key_file(tmp_path, text)))
    assert not text or text not in str(refused.value)
    if text:
        with pytest.raises(ConfigError, match="page_key does not hold 64 hex digits"):
            page_keys(ClientConfig(page_key=text))


def test_open_or_irregular_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"open to others \(mode 0644\); chmod o-r /"):
        page_keys(ClientConfig(page_key_file=key_file(tmp_path, SECRET.hex(), 0o644)))
    with pytest.raises(ConfigError, match="can not be read: No such file"):
        page_keys(ClientConfig(page_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="can not be read: Is a directory"):
        page_keys(ClientConfig(page_key_file=str(tmp_path)))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        page_keys(ClientConfig(page_key_file=str(tmp_path / "pipe")))
    with pytest.raises(ConfigError, match="both set"):
        page_keys(ClientConfig(page_key=SECRET.hex(), page_key_file="/there"))


def test_secret_is_not_in_the_repr() -> None:
    assert SECRET.hex() not in repr(ClientConfig(page_key=SECRET.hex()))


def test_former_module_name_warns_and_has_the_same_classes() -> None:
    with pytest.warns(DeprecationWarning, match="kvstore.page_hmac"):
        import kvstore.seals
    assert kvstore.seals.Seals is PageHmacs
    assert kvstore.seals.PageKeys is PageKeys


def test_former_name_of_needs_ack_warns() -> None:
    with pytest.warns(DeprecationWarning, match="needs_ack"):
        assert Keep(durable=True).promised
