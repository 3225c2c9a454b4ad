"""A few hundred inputs for every parser, and those that were once found. Many more: `make fuzz`."""

import random

import pytest
from found import FOUND
from mutations import inputs
from registered import targets
from watched import Watch

INPUTS = 400
TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_more_than_refused(seed: int, name: str) -> None:
    target, chance = TARGETS[name], random.Random(seed)
    data = b""
    with Watch() as watch:
        for _, data in zip(range(INPUTS), inputs(chance, target.seeds(), target.nbytes_max), strict=False):
            found = watch.run(target, data)
            assert found is None, f"{found.kind} of {name} by {data!r}: {found.told}"
        assert watch.check(target, data) is None


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_seed_is_taken(name: str) -> None:
    """Else what is made of it would all end at the door."""
    TARGETS[name].once(TARGETS[name].seeds()[0])
    assert TARGETS[name].check() == []


@pytest.mark.parametrize(("name", "data", "was"), FOUND, ids=[was for _, _, was in FOUND])
def test_what_was_found_once_is_refused(name: str, data: bytes, was: str) -> None:
    with Watch() as watch:
        found = watch.run(TARGETS[name], data) or watch.check(TARGETS[name], data)
    assert found is None, found.told
