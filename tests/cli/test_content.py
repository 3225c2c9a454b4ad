"""Page content that is derived from the key."""

from kvstore.tools.trace import page_content


def test_content_is_shake_128_of_the_key() -> None:
    # printf 'aaaaaaaaaaaaaaaabbbb' | openssl dgst -shake128 -xoflen 16
    assert page_content(b"a" * 16, b"bbbb", 16).hex() == "ab47e218ab900f1fc8dd3f17ee61d4f5"


def test_shorter_page_is_a_prefix_of_a_longer_one_without_repeats() -> None:
    content = page_content(b"n" * 16, b"key", 1 << 16)
    assert page_content(b"n" * 16, b"key", 100) == content[:100]
    pieces = [content[start : start + 16] for start in range(0, len(content), 16)]
    assert len(set(pieces)) == len(pieces)


def test_content_depends_on_namespace_and_key() -> None:
    contents = {
        page_content(bytes([n]) * 16, bytes([k]) * 32, 64) for n in range(3) for k in range(3)
    }
    assert len(contents) == 9
