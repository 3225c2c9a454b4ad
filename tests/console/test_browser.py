"""The console in a real browser: it shows and updates a node's state, and escapes names.

`make test-console` runs these tests; `PICTURES=docs/pictures` makes the pictures of the documents.
"""

import math
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium
from fleets import Start
from load import PAGE_TOKENS, Load, page
from visits import history_of

from kvstore import (
    Client,
    ClientConfig,
    LayerGroup,
    Namespace,
    PageLayout,
    Plane,
    opaque_layout,
    prefix_hashes,
)
from kvstore.cli.decode import plane_statistics
from kvstore.layout import DTYPE_NBYTES
from kvstore.pb import kvstore_pb2 as pb
from kvstore.security.identities import add, new_token, token_line
from kvstore.tools.node_process import NodeProcess
from node.server import Node
from node.serving.request_metrics import DISK

HOSTILE = """<script>window.hacked=1</script><img src=x onerror="window.hacked=2">'"&amp;"""
AXE = os.environ.get("KVSTORE_AXE", "")
PICTURE_NBYTES_MAX = 200_000
SOONER = "const timer = setTimeout; window.setTimeout = (then, ms) => timer(then, ms / 4);"
HOUR_S = 50.0  # seconds of load before the pictures, nearly an hour of history


def url(node: Node, path: str = "/console/") -> str:
    return f"http://127.0.0.1:{node.metrics.port}{path}"


def client(node: Node, **settings: Any) -> Client:
    return Client(
        ClientConfig(
            f"127.0.0.1:{node.grpc.port}", timeout_s=60.0, connect_timeout_s=30.0, **settings
        )
    )


def text(browser: Chromium, selector: str) -> str:
    found: str = browser.value(f"document.querySelector({selector!r}).textContent")
    return found


def live(browser: Chromium, address: str) -> None:
    browser.open(address)
    browser.until("document.getElementById('link').textContent === 'live'")


def check(browser: Chromium) -> None:
    """Check that there was no error, that the page fits the screen, and that fields have labels."""
    assert browser.errors == []
    assert (
        browser.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        == 0
    )
    unnamed = (
        "[...document.querySelectorAll('input, select')].filter((box) => !box.labels.length).length"
    )
    assert browser.value(unnamed) == 0, "a field has no label"


@pytest.fixture(scope="module")
def hostile(start: Start) -> Node:
    node = start()
    space = Namespace(HOSTILE, opaque_layout(4096))
    with client(node) as there:
        there.put(space, [b"\xab" * 32], [bytes(4096)])
        for _ in range(400):
            there.lookup(space, [b"\xab" * 32])
    return node


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1600])
def test_board_fits_the_screen_and_has_no_errors(
    browser: Chromium, busy: Node, width: int, scheme: str
) -> None:
    browser.size(width, 900)
    browser.scheme(scheme)
    live(browser, url(busy))
    browser.until(
        "document.querySelectorAll('#member-rows tbody tr').length", lambda count: count == 3
    )
    browser.until("document.querySelectorAll('#member-rows tbody a').length", lambda n: n == 2)
    browser.until("document.querySelectorAll('#graphs polyline.line').length > 3")
    browser.until(
        "document.querySelectorAll('#space-rows tbody tr').length", lambda count: count == 2
    )
    zones = (
        "[...document.querySelectorAll('#member-rows tbody tr')].map((r) => r.cells[2].innerText)"
    )
    assert [zone.split("\n")[-1] for zone in browser.value(zones)] == ["rack-a", "rack-a", "rack-b"]
    browser.until("document.querySelector('#cluster-tiles').textContent.includes('3 of 3')")
    browser.value("document.querySelector('#hot-rows a').click()")
    browser.until("document.querySelectorAll('.plane canvas').length > 1")
    check(browser)
    assert cut_labels(browser) == []
    assert violations(browser) == []


def cut_labels(browser: Chromium) -> Any:
    """Return the labels of the graphs that are not wholly within their picture."""
    return browser.value(
        """[...document.querySelectorAll('.graph svg')].flatMap((picture) => {
            const all = picture.getBoundingClientRect();
            return [...picture.querySelectorAll('text')].filter((text) => {
                const box = text.getBoundingClientRect();
                return box.left < all.left || box.right > all.right || box.bottom > all.bottom;
            }).map((text) => text.textContent);
        })"""
    )


def violations(browser: Chromium) -> Any:
    """Return what axe-core finds; nothing without KVSTORE_AXE, the path of its axe.min.js."""
    if not AXE:
        return []
    browser.value(Path(AXE).read_text() + "; 0")
    return browser.value(
        "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map("
        "(one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 99))}`))"
    )


def test_range_of_the_graphs_is_kept_in_the_address(browser: Chromium, busy: Node) -> None:
    browser.size(1600, 900)
    live(browser, url(busy, "/"))
    assert browser.value("location.pathname") == "/console/"
    browser.until("document.querySelectorAll('#graphs polyline.line').length > 3")
    chosen = "document.querySelector('#ranges [aria-current]').textContent"
    assert browser.value(chosen) == "1 h"
    browser.value("[...document.querySelectorAll('#ranges a')][0].click()")
    browser.until(f"{chosen} === '10 min'")
    assert browser.value("location.hash") == "#range=10m"
    browser.value("document.querySelector('#sections a').click()")
    browser.until("location.hash === '#range=10m&at=now'")
    live(browser, url(busy, "/console/#range=24h"))
    browser.until(f"{chosen} === '24 h'")


def test_axis_begins_at_the_first_sample(browser: Chromium, start: Start) -> None:
    node = start()
    history, now_s = history_of(node), time.time()
    live(browser, url(node))
    assert "no samples yet" in text(browser, "#graphs")
    history.poll = lambda: None  # type: ignore[method-assign]
    for number in range(4):
        history._wall = lambda number=number: now_s - 40 + 10 * number
        history._take(history._clock() + number)
    live(browser, url(node))
    browser.until("document.querySelectorAll('#graphs polyline.line').length > 0")
    points = browser.value(
        "document.querySelectorAll('#graphs polyline.line')[1].getAttribute('points')"
    )
    first, *_, last = (float(point.split(",")[0]) for point in points.split(" "))
    width = browser.value("document.querySelector('#graphs svg').clientWidth")
    assert last - first > width / 2, "three samples must fill more than half of the axis"


def test_numbers_are_updated(browser: Chromium, busy: Node) -> None:
    live(browser, url(busy))
    browser.until("document.querySelector('#tiles dd').firstChild.textContent !== '–'")
    before = text(browser, "#tiles"), text(browser, "#graphs")
    browser.until(f"document.querySelector('#tiles').textContent !== {before[0]!r}")
    browser.until(f"document.querySelector('#graphs').textContent !== {before[1]!r}")
    assert text(browser, "#link") == "live"


def test_graph_can_be_read_with_the_keyboard(browser: Chromium, busy: Node) -> None:
    live(browser, url(busy))
    browser.until("document.querySelectorAll('#graphs polyline.line').length > 3")
    browser.value("document.querySelector('#graphs svg').focus()")
    browser.press("ArrowLeft")
    browser.until("document.querySelectorAll('#graphs .cursor[visibility=visible]').length > 0")
    label = "document.querySelector('#graphs svg').getAttribute('aria-label')"
    assert re.match(r"Hit rate, \d\d:\d\d:\d\d: of requested pages", browser.value(label))
    cursors = "document.querySelectorAll('#graphs .cursor[visibility=visible]').length"
    assert browser.value(cursors) == browser.value(
        "document.querySelectorAll('#graphs svg').length"
    )


def test_hostile_names_are_shown_as_text(browser: Chromium, hostile: Node) -> None:
    live(browser, url(hostile))
    browser.until(f"document.querySelector('#space-rows').textContent.includes({HOSTILE!r})")
    browser.until("document.querySelectorAll('#hot-rows a').length === 2")
    browser.value("document.querySelector('#hot-rows a').click()")
    browser.until(f"document.querySelector('#look-found').textContent.includes({HOSTILE!r})")
    assert HOSTILE in text(browser, "#look-space")
    assert browser.value("window.hacked") is None
    assert browser.value("document.querySelectorAll('body script, main img').length") == 0
    check(browser)


def test_latencies_and_slow_calls_are_drawn(browser: Chromium, start: Start) -> None:
    node = start()
    live(browser, url(node))
    assert "None: no call" in text(browser, "#slow-rows")
    slow, now_ns = node.service.traffic.slow, time.monotonic_ns()
    space = Namespace(HOSTILE, opaque_layout(4096), "team-x")
    with client(node) as there:
        there.put(space, [b"\xcd" * 32], [bytes(4096)])
    slow.step(DISK, now_ns - 50_000_000, now_ns)
    slow.step(HOSTILE, now_ns, now_ns + 20_000_000)
    about = pb.GetRequest(namespace=space.digest, prefix_hashes=[b"\xcd" * 32])
    slow.ended("get", "bulk", now_ns - 80_000_000, 120_000_000, None, about, "unavailable")
    history = history_of(node)
    for _ in range(3):
        node.service.traffic.of_wire("bulk").answered("get", time.monotonic_ns() - 1_000_000)
        history._take(history._clock())
    live(browser, url(node))
    browser.until("document.querySelectorAll('#slow-rows .timeline rect').length === 3")
    shown = text(browser, "#slow-rows tbody")
    for part in (HOSTILE, "team-x", "unavailable", "4 KiB", "disk 50 ms", "node 50 ms"):
        assert part in shown, part
    assert "Get latency" in text(browser, "#graphs")
    assert "get" in text(browser, "#operation-rows")
    browser.value("[...document.querySelectorAll('#slow-rows a')][1].click()")
    browser.until(f"document.querySelector('#look-found').textContent.includes('{'cd' * 32}')")
    check(browser)


def test_hanging_node_is_not_shown_as_live(browser: Chromium) -> None:
    """Regression: the page stayed "live" when the node hung, as the connection stayed open."""
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=SOONER)
    with NodeProcess(
        "--ram-bytes", "64MiB", "--shm-socket", "none", "--log-level", "ERROR"
    ) as process:
        live(browser, f"http://127.0.0.1:{process.metrics_port}/console/")
        process.pause()
        browser.until(
            "document.getElementById('link').textContent.includes('no message from the node')"
        )
        process.resume()
        browser.until("document.getElementById('link').textContent === 'live'")


def test_hidden_tab_pauses_even_if_it_was_never_visible(browser: Chromium, hostile: Node) -> None:
    """Regression: a tab opened in the background kept its stream for ever."""
    unseen = (
        "window.unseen = true; Object.defineProperty(document, 'hidden', {get: () => "
        "window.unseen});"
    )
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=SOONER + unseen)
    browser.open(url(hostile))
    browser.until("document.getElementById('link').textContent === 'paused while hidden'")
    browser.value("window.unseen = false; document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("document.getElementById('link').textContent === 'live'")
    check(browser)


# ---- authentication --------------------------------------------------------------------------


def test_token_is_asked_for_kept_in_the_tab_and_removed(
    browser: Chromium, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.console.snapshot.NAMESPACES_MAX", 10)
    token = new_token("team-a")
    add(tmp_path / "identities", token_line("writer", token, tenant="team-a", role="write"))
    node = start(identities=str(tmp_path / "identities"))
    browser.size(375, 800)
    browser.open(url(node))
    browser.until("document.activeElement.id === 'token'")
    assert browser.value("document.getElementById('board').hidden")
    browser.type("wrong")
    browser.press("Enter")
    browser.until("document.getElementById('token-error').textContent.includes('does not know')")
    browser.type(token)
    browser.press("Enter")
    browser.until("document.getElementById('link').textContent === 'live'")
    assert "write of team-a" in text(browser, "#who")
    assert browser.value("document.getElementById('acts').hidden")
    assert browser.value("document.getElementById('cluster').hidden")
    assert "RAM: 0 B" in text(browser, "#fill")
    with client(node, token=token) as there:
        for number in range(12):
            there.put(
                Namespace(f"model-{number}", opaque_layout(4096), "team-a"),
                [b"k" * 32],
                [bytes(4096)],
            )
    browser.until("document.querySelector('#fill').textContent.includes('RAM: 48 KiB')")
    assert "other 20 KiB" in text(browser, "#fill")
    assert (
        browser.value("location.href + document.cookie + JSON.stringify(localStorage)")
        == url(node) + "{}"
    )
    assert browser.errors.count(browser.errors[0]) == len(browser.errors), (
        "an error other than the refused calls, which the browser logs"
    )
    assert "401" in browser.errors[0]
    browser.errors.clear()
    live(browser, url(node))
    browser.value("document.getElementById('sign-out').click()")
    browser.until("document.activeElement?.id === 'token'")
    assert browser.value("sessionStorage.length") == 0


# ---- pages -----------------------------------------------------------------------------------


def test_page_is_looked_up_drawn_and_removed(browser: Chromium, start: Start) -> None:
    node = start(data_dir="")
    planes = (Plane("k", "bfloat16", (2, 16)), Plane("v", "float8_e4m3fn", (2, 16)))
    layout = PageLayout(PAGE_TOKENS, (LayerGroup("attention", (0, 1, 2), planes),))
    space, (key,) = Namespace("llama", layout), prefix_hashes(range(PAGE_TOKENS), PAGE_TOKENS)
    content = page(layout)
    with client(node) as there:
        there.put(space, [key], [content])
    live(browser, url(node))
    assert browser.value("document.getElementById('look-space').value") == space.digest.hex()
    browser.value("document.querySelector('#look-form button').click()")
    browser.until(
        f"document.querySelector('#look-found').textContent.includes({space.digest.hex()!r})"
    )
    browser.value("document.getElementById('look-key').focus()")
    browser.type(key.hex()[:8])
    browser.press("Enter")
    browser.until("document.querySelectorAll('.plane canvas').length === 4")
    assert key.hex() in text(browser, "#look-found")
    k = plane_statistics("bfloat16", memoryview(content)[: layout.slices[0].nbytes])
    assert k.min is not None
    least = text(browser, ".plane .keys").partition("mean")[0].removeprefix("least ")
    assert float(least) == pytest.approx(k.min, rel=1e-3), (
        "the console rounds halves up, Python to even"
    )
    pixels = (
        "new Set(document.querySelector('canvas.heat').getContext('2d').getImageData(0, 0, "
        "32, 16).data).size"
    )
    assert browser.value(pixels) > 20, "the picture has hardly any colors"
    browser.value(
        "(() => { const pick = document.getElementById('look-layer'); pick.value = 2; "
        "pick.dispatchEvent(new Event('change')); })()"
    )
    offset = next(piece.offset for piece in layout.slices if piece.layer == 2)
    browser.until(f"document.querySelector('.plane')?.textContent.includes('from {offset:,}')")
    browser.value("document.querySelector('#look-found button.danger').click()")
    browser.until("document.getElementById('confirm').open")
    browser.value("document.getElementById('confirm-no').click()")
    with client(node) as there:
        assert there.lookup(space, [key]).prefix_pages == 1, (
            "the page was removed without confirmation"
        )
        browser.value("document.querySelector('#look-found button.danger').click()")
        browser.value("document.getElementById('confirm-yes').click()")
        browser.until("document.getElementById('look-said').textContent === 'The page is removed.'")
        assert there.lookup(space, [key]).prefix_pages == 0
    check(browser)


def test_planes_are_decoded_as_by_the_command_line(browser: Chromium, hostile: Node) -> None:
    live(browser, url(hostile))
    rng = random.Random(5)
    for dtype, nbytes in DTYPE_NBYTES.items():
        data = rng.randbytes(512 * nbytes)
        code = f"""(async () => {{
            const planes = await import("{url(hostile)}planes.js");
            const data = Uint8Array.from({list(data)}).buffer;
            return planes.statistics(planes.decode("{dtype}", data));
        }})()"""
        decoded, wanted = browser.value(code), plane_statistics(dtype, memoryview(data))
        counted = (decoded["count"], decoded["nan"], decoded["inf"], decoded["zero"])
        assert counted == (wanted.count, wanted.nan_count, wanted.inf_count, wanted.zero_count), (
            dtype
        )
        assert decoded["min"] == pytest.approx(wanted.min), dtype
        assert decoded["max"] == pytest.approx(wanted.max), dtype
        if dtype != "float64":  # its squares overflow a double
            assert decoded["mean"] == pytest.approx(wanted.mean, rel=1e-9), dtype
    assert browser.errors == []


def test_slices_of_layouts_equal_those_of_the_node(browser: Chromium, hostile: Node) -> None:
    live(browser, url(hostile))
    groups = (
        LayerGroup(
            "full",
            (0, 3),
            (Plane("k", "float16", (2, 8)), Plane("block", "uint8", (5,), unit_tokens=4)),
        ),
        LayerGroup("window", (1, 2), (Plane("kv", "float32", (3,)),)),
    )
    layout = PageLayout(8, groups)
    described = {
        "page_tokens": 8,
        "groups": [
            {
                "name": group.name,
                "layers": list(group.layers),
                "planes": [
                    {
                        "name": p.name,
                        "dtype": p.dtype,
                        "unit_tokens": p.unit_tokens,
                        "unit_shape": list(p.unit_shape),
                    }
                    for p in group.planes
                ],
            }
            for group in groups
        ],
    }
    code = f"""(async () => (await import("{url(hostile)}planes.js")).slices({described})
        .map((slice) => [slice.group, slice.layer, slice.name, slice.offset, slice.nbytes]))()"""
    wanted = [
        [piece.group, piece.layer, piece.plane.name, piece.offset, piece.nbytes]
        for piece in layout.slices
    ]
    assert browser.value(code) == wanted


# ---- pictures --------------------------------------------------------------------------------


def test_pictures_of_the_documents_are_made(
    browser: Chromium, load: Load, pictures: Path | None
) -> None:
    if pictures is None:
        pytest.skip("PICTURES=docs/pictures makes them")
    pictures.mkdir(exist_ok=True)
    busy = load.near
    time.sleep(HOUR_S)
    load.sampled = False  # stop the fast sampling, which is too much for a page's stream
    history_of(busy)._recent.taken_s = math.inf  # and the ordinary one, whose clock stands out
    wide, narrow, look = (pictures / f"console-{name}.png" for name in ("wide", "narrow", "page"))
    browser.size(1600, 1000)
    browser.scheme("light")
    live(browser, url(busy))
    time.sleep(8.0)
    bottom = browser.value("document.getElementById('members').getBoundingClientRect().bottom")
    browser.picture(wide, height=bottom + 8, scale=0.75)
    browser.value("document.querySelector('#hot-rows a').click()")
    browser.until("document.querySelectorAll('.plane canvas').length > 3")
    box = browser.value(
        "(({top, height}) => [top + scrollY, "
        "height])(document.getElementById('look').getBoundingClientRect())"
    )
    browser.picture(look, top=box[0] - 8, height=box[1] + 16)
    browser.size(375, 800)
    browser.scheme("dark")
    live(browser, url(busy))
    time.sleep(4.0)
    browser.picture(narrow, height=1400)
    for path in (wide, narrow, look):
        assert path.stat().st_size < PICTURE_NBYTES_MAX, path.name
