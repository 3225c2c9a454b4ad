"""Run every parser on some inputs, and on the inputs of former bugs.

`make fuzz` runs many more.
"""

import random
from collections.abc import Callable, Iterator

import pytest
from found import FOUND
from mutations import inputs
from registered import TARGETS
from watched import Target, Watch

INPUTS = 150
Make = Callable[[str], Target]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Target] = []

    def make(name: str) -> Target:
        made.append(TARGETS[name]())
        return made[-1]

    yield make
    for target in made:
        target.close()


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs_cause_no_finding(make: Make, seed: int, name: str) -> None:
    target, chance = make(name), random.Random(seed)
    data = b""
    with Watch() as watch:
        for _, data in zip(
            range(INPUTS), inputs(chance, target.seeds(), target.nbytes_max), strict=False
        ):
            found = watch.run(target, data)
            assert found is None, f"{found.kind} of {name} by {data!r}: {found.details}"
        assert watch.check(target, data) is None


@pytest.mark.parametrize("name", TARGETS)
def test_first_seed_is_accepted(make: Make, name: str) -> None:
    """Each target accepts its first seed; otherwise all its mutations would be refused early."""
    target = make(name)
    target.once(target.seeds()[0])
    assert target.check() == []


@pytest.mark.parametrize(("name", "data", "was"), FOUND, ids=[was for _, _, was in FOUND])
def test_inputs_of_earlier_findings_are_refused(
    make: Make, name: str, data: bytes, was: str
) -> None:
    target = make(name)
    with Watch() as watch:
        found = watch.run(target, data) or watch.check(target, data)
    assert found is None, found.details
