"""`kvstore certs` makes certificates for nodes and clients, with keys for their owner only."""

import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from kvstore.tools.node_process import NodeProcess

Kvstore = Callable[..., Any]
DAY_S = 86400


@pytest.fixture
def folder(kvstore: Kvstore, tmp_path: Path) -> Path:
    """Return a folder with an authority."""
    assert kvstore("certs", "ca", "--dir", str(tmp_path / "certs")).code == 0
    return tmp_path / "certs"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_node_and_command_use_the_certificates(
    kvstore: Kvstore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--dir", str(folder))
    made = kvstore(
        "certs", "node", "localhost", "127.0.0.1", "::1", "--file", "node", *at, "--json"
    )
    assert made.json["certificate"] == str(folder / "node.pem")
    assert abs(made.json["ends_unix_s"] - time.time() - 365 * DAY_S) < DAY_S
    assert kvstore("certs", "client", "team-a", *at, "--days", "2").stdout.startswith(
        f"{folder}/team-a.pem and "
    )
    flags = (
        "--tls-cert",
        folder / "node.pem",
        "--tls-key",
        folder / "node.key",
        "--tls-client-ca",
        folder / "ca.pem",
    )
    with NodeProcess("--ram-bytes", "16MiB", *map(str, flags)) as node:
        refused = kvstore("status", "-a", node.address)
        assert refused.code == 3
        assert (
            "the node uses TLS; name the authority of its certificate with tls_ca" in refused.stderr
        )
        for name, file in (("CA", "ca.pem"), ("CERT", "team-a.pem"), ("KEY", "team-a.key")):
            monkeypatch.setenv(f"KVSTORE_TLS_{name}", str(folder / file))
        shown = kvstore("status", "-a", node.address)
        assert shown.code == 0, shown.stderr
        assert "TLS on, with certificates of clients  tls_cert until " in shown.stdout
        found = kvstore("status", "-a", node.address, "--json").json["tls"]["certificates"]
        assert [one["setting"] for one in found] == ["tls_cert", "tls_client_ca"]
        monkeypatch.setenv("KVSTORE_TLS_KEY", str(folder / "node.key"))
        mixed = kvstore("status", "-a", node.address)
        assert mixed.code == 2
        assert "is not the key of the certificate in tls_cert=" in mixed.stderr
        monkeypatch.setenv("KVSTORE_TLS_KEY", str(folder / "team-a.key"))
        # Another authority: gRPC has a line of its own about the handshake
        assert kvstore("certs", "ca", "--dir", str(folder / "other")).code == 0
        command = [sys.executable, "-m", "kvstore", "status", "-a", node.address]
        command += ["--tls-ca", str(folder / "other" / "ca.pem")]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr.count("\n")) == (3, 1), shown.stderr


def test_status_warns_of_a_node_without_tls(kvstore: Kvstore) -> None:
    assert (
        "TLS off: anyone on the network path can read and change all traffic"
        in kvstore("status").stdout
    )


def test_status_of_a_node_without_tcp_does_not_warn(kvstore: Kvstore, tmp_path: Path) -> None:
    path = f"{tmp_path}/only.sock"
    with NodeProcess("--ram-bytes", "16MiB", "--host", "none", "--shm-socket", path):
        said = kvstore("status", "-a", f"unix:{path}").stdout
    assert "TLS off: it serves by its Unix socket only" in said


def test_keys_are_private_and_certificates_have_the_given_names(
    kvstore: Kvstore, folder: Path
) -> None:
    assert (
        kvstore("certs", "node", "node1", "10.0.0.5", "--dir", str(folder), "--days", "3").code == 0
    )
    assert kvstore("certs", "client", "team-a", "--dir", str(folder)).code == 0
    assert {mode(path) for path in folder.glob("*.key")} == {0o600}
    assert not list(folder.glob(".*"))
    node = x509.load_pem_x509_certificate((folder / "node1.pem").read_bytes())
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node1"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    uses = [
        {use._name for use in made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value}
        for made in (node, x509.load_pem_x509_certificate((folder / "team-a.pem").read_bytes()))
    ]
    assert uses == [{"serverAuth", "clientAuth"}, {"clientAuth"}]


@pytest.mark.parametrize("words", [("ca",), ("node", "team-a"), ("client", "team-a")])
def test_files_are_overwritten_with_force_only(
    kvstore: Kvstore, folder: Path, words: tuple[str, ...]
) -> None:
    at = ("--dir", str(folder))
    assert kvstore("certs", "client", "team-a", *at).code == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    refused = kvstore("certs", *words, *at)
    assert refused.code == 2
    assert "exists already; --force replaces it" in refused.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert kvstore("certs", *words, *at, "--force").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("node", "no host"), "'no host' is no name of a file"),
        (("node", "nöde", "--file", "node"), "neither a host's name in ASCII nor an address"),
        (
            ("client", "x" * 65, "--file", "x"),
            "has 65 characters; a certificate's name has 1 to 64",
        ),
        (("client", "a/../b"), "'a/../b' is no name of a file"),
        (("client", "late", "--days", "0"), "--days"),
        (
            ("client", "kvstore development CA", "--file", "x"),
            "is the name of the authority itself; choose another",
        ),
    ],
)
def test_certs_with_invalid_values_is_refused(
    kvstore: Kvstore, folder: Path, words: tuple[str, ...], message: str
) -> None:
    ran = kvstore("certs", *words, "--dir", str(folder))
    assert ran.code == 2
    assert message in ran.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem"]


def test_certs_without_an_authority_is_refused(
    kvstore: Kvstore, tmp_path: Path, folder: Path
) -> None:
    ran = kvstore("certs", "node", "localhost", "--dir", str(tmp_path / "nowhere"))
    assert ran.code == 2
    assert "make an authority first: kvstore certs ca" in ran.stderr
    kvstore("certs", "ca", "--dir", str(tmp_path / "other"))
    (folder / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    assert (
        "ca.key is not the key of ca.pem"
        in kvstore("certs", "client", "x", "--dir", str(folder)).stderr
    )


def test_certs_without_cryptography_names_the_extra(
    kvstore: Kvstore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvstore.cli.authority", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    ran = kvstore("certs", "client", "x", "--dir", str(folder))
    assert ran.code == 2
    assert "cryptography is not installed; pip install 'kvstore-llm[cli]'" in ran.stderr


def test_throwaway_node_is_used_without_tls(
    kvstore: Kvstore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    monkeypatch.delenv("KVSTORE_ADDRESS")
    monkeypatch.setenv("KVSTORE_TLS_CA", str(folder / "ca.pem"))
    ran = kvstore("replay", str(trace), "--capacity-pages", "100", "--page-bytes", "4096")
    assert ran.code == 0, ran.stderr
