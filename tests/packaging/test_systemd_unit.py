"""The systemd unit, and the configuration file beside it."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from node.config import NodeConfig
from node.config_file import load_settings
from node.main import _parser

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "kvstore-node.service"


def test_unit_fits_the_node() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(UNIT)
    service = unit["Service"]
    assert (service["Type"], service["ExecReload"]) == ("notify", "/bin/kill -HUP $MAINPID")
    assert _parser().parse_args(service["ExecStart"].split()[1:]).config
    config = NodeConfig()
    assert int(service["TimeoutStopSec"]) > config.drain_s + config.flush_s + 20
    assert service["RestartPreventExitStatus"] == "2"
    folders = {
        f"/{top}/{service[name]}"
        for name, top in (
            ("StateDirectory", "var/lib"),
            ("RuntimeDirectory", "run"),
            ("LogsDirectory", "var/log"),
        )
    }
    settings = load_settings({}, str(FOLDER / "node.toml")).config
    assert {str(Path(settings.data_dir).parent), str(Path(settings.shm_socket).parent)} < folders


def test_commented_settings_of_the_file_are_valid(tmp_path: Path) -> None:
    lines = (FOLDER / "node.toml").read_text().splitlines()
    settings = [line.removeprefix("# ") for line in lines if re.match("# [a-z-]+ = ", line)]
    text = "\n".join(settings)
    path = tmp_path / "node.toml"
    path.write_text(text)
    path.chmod(0o640)
    assert load_settings({}, str(path)).config.tls_client_ca == "/etc/kvstore/ca.pem"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvstore/bin/kvstore-node", "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
