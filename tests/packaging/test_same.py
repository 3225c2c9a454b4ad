"""`tests/docker/same.py`, which compares images for `make test-image`, reports every difference
except the build time.
"""

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location(
    "same", Path(__file__).parents[1] / "docker" / "same.py"
)
assert _spec is not None
assert _spec.loader is not None
same: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(same)


def packed(files: dict[str, bytes], **about: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in about.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def image(tmp_path: Path) -> Any:
    """Return a function that writes an image with one file, as `docker save` would."""

    def save(
        name: str, content: bytes = b"node", created: str = "now", user: str = "10001", **about: int
    ) -> str:
        layer = packed({"opt/node": content}, **about)
        config = {
            "created": created,
            "config": {"User": user},
            "rootfs": {"diff_ids": [layer.hex()]},
        }
        manifest = [{"Config": "config.json", "Layers": ["1/layer.tar"]}]
        texts = {
            "config.json": json.dumps(config).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }
        (tmp_path / name).write_bytes(packed({**texts, "1/layer.tar": layer}))
        return str(tmp_path / name)

    return save


def test_build_time_is_no_difference(image: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert same.main(image("one"), image("two", created="later")) == 0
    assert capsys.readouterr().out == (
        "1 files are the same, with names, modes, owners, times and contents; layers are the same, "
        "byte by byte\n"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"content": b"edon"}, "opt/node: content "),
        ({"mtime": 7}, "opt/node: time_s 0 / 7"),
        ({"mode": 0o600}, "opt/node: mode 0o644 / 0o600"),
        ({"uid": 10001}, "opt/node: owner 0:0 / 10001:0"),
        ({"user": "0"}, "config: {'User': '10001'} / {'User': '0'}"),
    ],
)
def test_compared_images_report_differences(
    image: Any, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], message: str
) -> None:
    assert same.main(image("one"), image("two", **changed)) == 1
    assert capsys.readouterr().out.startswith(message)
