"""Console colours are readable: each ink on each background, light and dark (WCAG, AA)."""

import re
from pathlib import Path

import pytest

import node.console

STYLE = (Path(node.console.__file__).parent / "style.css").read_text()
TEXT_RATIO, MARK_RATIO = 4.5, 3.0
INKS = ("ink", "faint", "good", "warn", "bad", "accent")
MARKS = tuple(f"s{number}" for number in range(1, 9))


def colours(block: str) -> dict[str, tuple[float, float, float]]:
    def part(digits: str) -> float:
        share = int(digits, 16) / 255
        return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)

    found = re.findall(r"--([a-z0-9]+): #([0-9a-f]{6})", block)
    return {name: (part(text[:2]), part(text[2:4]), part(text[4:])) for name, text in found}


def ratio(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    light, dark = sorted(
        (0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] for c in (one, other)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


def schemes() -> dict[str, str]:
    light, dark = (block.partition("}")[0] for block in STYLE.split(":root {")[1:3])
    return {"light": light, "dark": dark}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_ink_has_contrast_on_every_background(scheme: str) -> None:
    palette = colours(schemes()[scheme])
    assert {*INKS, *MARKS, "panel", "ground"} <= palette.keys()
    for ground in ("panel", "ground"):
        ratios = {ink: round(ratio(palette[ink], palette[ground]), 2) for ink in (*INKS, *MARKS)}
        assert {
            ink: value for ink, value in ratios.items() if ink in INKS and value < TEXT_RATIO
        } == {}
        assert {
            ink: value for ink, value in ratios.items() if ink in MARKS and value < MARK_RATIO
        } == {}


def test_light_and_dark_schemes_define_the_same_colours() -> None:
    light, dark = (colours(block) for block in schemes().values())
    assert light.keys() == dark.keys()
