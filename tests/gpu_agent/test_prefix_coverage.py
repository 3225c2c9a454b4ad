"""Which prefix lengths can be restored from the pages present in each pool."""

import pytest

from gpu_agent.lookup_cache import covered, together


def flags(text: str) -> list[bool]:
    return [sign == "1" for sign in text]


@pytest.mark.parametrize(
    ("present", "trailing", "lengths"),
    [
        ("1111", 0, [1, 2, 3, 4]),
        ("1101", 0, [1, 2]),
        ("0111", 0, []),
        ("", 0, []),
        ("0111", 1, [2, 3, 4]),
        ("001001001", 1, [3, 6, 9]),
        ("110111", 2, [1, 2, 5, 6]),
        ("1", 3, [1]),
        ("0111", 3, [4]),
        ("111", 9, [1, 2, 3]),
        ("0111", 9, []),
        ("", 2, []),
    ],
)
def test_lengths_covered_by_a_pool(present: str, trailing: int, lengths: list[int]) -> None:
    assert covered(flags(present), trailing) == lengths


def test_covered_lengths_match_the_definition() -> None:
    for number in range(1 << 8):
        present = flags(f"{number:08b}")
        for trailing in range(1, 5):
            expected = [n for n in range(1, 9) if all(present[max(0, n - trailing) : n])]
            assert covered(present, trailing) == expected
        assert covered(present) == [n for n in range(1, 9) if all(present[:n])]


def test_lengths_of_several_pools_are_intersected() -> None:
    assert together([[1, 2, 3, 4], [2, 4]]) == [2, 4]
    assert together([[1, 2], [3]]) == []
    assert together([[3, 6, 9], [3, 6, 8], list(range(1, 10))]) == [3, 6]
    assert together([]) == []
