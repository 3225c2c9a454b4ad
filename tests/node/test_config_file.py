"""The configuration file of a node, and `--print-config`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import ConfigError
from node.config import GROUPS
from node.config_file import KEYS, TABLES, load_settings
from node.main import with_flags
from node.tls import certificates_of

WriteFile = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    def write(text: str) -> str:
        path = tmp_path / "node.toml"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o640)
        return str(path)

    return write


def test_flag_comes_before_variable_before_file_before_default(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        'port = 1\nzone = "größe"\n'
        '[network]\nbulk_port = "2"\nmetrics-port = 3\n[limits]\ndrain-s = 7\n[expert]\nsweep-s = 0'
    )
    monkeypatch.setenv("KVSTORE_NODE_BULK_PORT", "22")
    monkeypatch.setenv("KVSTORE_NODE_METRICS_PORT", "33")
    found = load_settings({"metrics_nothing": None, "metrics_port": "333"}, path)
    config, of = found.config, found.sources
    assert (config.port, config.bulk_port, config.metrics_port) == (1, 22, 333)
    assert (config.drain_s, config.sweep_s, config.zone) == (7.0, 0.0, "größe")
    assert (of["port"], of["bulk_port"]) == (path, "KVSTORE_NODE_BULK_PORT")
    assert (of["metrics_port"], of["host"]) == ("--metrics-port", "default")
    assert of["extent_nbytes"] == "derived"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ram-byte = 1", "unknown setting ram-byte; did you mean ram-bytes?"),
        ("quux = 1", "unknown setting quux; kvstore-node --help lists the settings"),
        ("[memry]\nram-bytes = 1", "unknown table [memry]; did you mean [memory]?"),
        ("[disk]\nram-bytes = 1", "ram-bytes belongs to the table [memory], not to [disk]"),
        ("port = 1\n[network]\nport = 1", "port is given twice"),
        ('token = "x"', "token is a secret, which only KVSTORE_NODE_TOKEN sets"),
        ("ram-bytes = true", "ram-bytes=True must be of type int, or text"),
        ('ram-bytes = "lots"', "ram-bytes='lots' is no number in 4096"),
        ("port = ", "is no TOML: Invalid value (at end of document)"),
        ("#" * (1 << 20) + "\n", "is larger than 1MiB: no settings"),
    ],
)
def test_wrong_file_is_refused_with_its_name_and_the_remedy(
    write: WriteFile, text: str, error: str
) -> None:
    path = write(text)
    with pytest.raises(ConfigError, match=f"^{re.escape(path)}:? {re.escape(error)}"):
        load_settings({}, path)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml can not be read: .*No such file"):
        load_settings({}, str(tmp_path / "absent.toml"))


def test_file_that_everybody_may_write_is_refused(tmp_path: Path, write: WriteFile) -> None:
    """The file names a command that the node runs."""
    path = write('encrypt-key-command = "cat key"\ndata-dir = "/d"')
    Path(path).chmod(0o646)
    with pytest.raises(ConfigError, match=r"may be written by every user .*: chmod o-w /"):
        load_settings({}, path)


def test_password_in_the_url_of_etcd_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="set etcd_user, and the variable") as refused:
        load_settings({"cluster": "etcd://user:hidden@h:2379/fleet", "member": "n1"})
    assert "hidden" not in str(refused.value)


def test_printed_configuration_is_a_file_with_the_same_settings(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_NODE_TOKEN", "not-to-be-shown")
    flags = {"ram_nbytes": "64GB", "zone": 'a "b" \\ ü\n', "sweep_s": "1h", "insecure": "true"}
    first = load_settings(flags)
    text = first.as_toml()
    assert "not-to-be-shown" not in text + first.as_json()
    assert "# KVSTORE_NODE_TOKEN is set\n" in text
    assert 'host = "127.0.0.1"  # default\n' in text
    assert re.search(r"^# extent-bytes = .*  # derived$", text, re.MULTILINE)
    assert load_settings({}, write(text)).config == first.config
    printed = json.loads(first.as_json())
    assert printed["settings"]["sweep-s"] == {"value": 3600.0, "source": "--sweep-s"}
    assert printed["settings"].keys() == KEYS.keys()
    assert printed["secrets"]["token"] == {"set": True, "source": "KVSTORE_NODE_TOKEN"}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"disk_nbytes": "1"}, "--disk-bytes=1 is outside 1048576.."),
        ({"tls_cert": "x"}, "--tls-cert and --tls-key are given together"),
        ({"host": "192.0.2.9"}, "--host=192.0.2.9 lets others reach this node without "),
        ({"encrypt_key_file": "/a/port=b"}, "--encrypt-key-file and --encrypt-key-command are for"),
    ],
)
def test_error_names_the_flag_of_the_setting(flags: dict[str, str], error: str) -> None:
    """Regression: `--disk-bytes 1` was answered with `disk_nbytes=1 is outside ...`."""
    with pytest.raises(ConfigError) as raised:
        certificates_of(load_settings(flags).config)
    assert with_flags(str(raised.value)).startswith(error)


def test_print_config_names_misspelled_variables(tmp_path: Path) -> None:
    """Regression: the node's log did, the command that checks settings did not."""
    environment = {**os.environ, "KVSTORE_NODE_RAM_BYTE": "1GiB"}
    command = [sys.executable, "-m", "node.main", "--print-config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[network]")
    assert "KVSTORE_NODE_RAM_BYTE sets nothing; did you mean KVSTORE_NODE_RAM_BYTES?" in done.stderr


def test_tables_are_the_groups_of_the_help() -> None:
    assert [*TABLES] == [*(title.lower() for title in GROUPS), "expert"]
