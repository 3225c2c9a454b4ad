"""TLS and passwords of a real etcd: each error names its cause and its remedy."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import members, peers, small_nodes, stop
from real_etcd import RealEtcd
from waiting import wait_until

from kvstore.errors import ConfigError
from node.cluster.etcd import EtcdCredentials
from node.server import Node

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None or shutil.which("openssl") is None, reason="needs etcd and openssl"
)
ETCD_FILES = ("etcd_ca", "etcd_cert", "etcd_key")


class Authority:
    """A certificate authority, made with the openssl command."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        request = (
            "req",
            "-x509",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        )
        self._openssl(*request, *KEY)
        (folder / "uses").write_text(
            "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
        )

    @property
    def path(self) -> str:
        return str(self._folder / f"{self._name}.pem")

    def issue(self, name: str, days: int = 2) -> tuple[str, str]:
        """Issue a certificate for this host; return its path and that of its key."""
        self._openssl(
            "req", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr", *KEY
        )
        signed = (
            "-CA",
            self.path,
            "-CAkey",
            f"{self._name}.key",
            "-CAcreateserial",
            "-extfile",
            "uses",
        )
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", str(days), *signed
        )
        return str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key")

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self._folder, check=True, capture_output=True)


KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("strangers"), "strangers")


def start_etcd(folder: Path, ca: str, cert: str, key: str) -> RealEtcd:
    """Start an etcd that requires client certificates.

    The tests use the server's certificate as their client certificate.
    """
    flags = ["--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", ca]
    return RealEtcd(folder, EtcdCredentials(ca, cert, key), flags)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory, ours: Authority) -> Iterator[RealEtcd]:
    etcd = start_etcd(tmp_path_factory.mktemp("etcd") / "data", ours.path, *ours.issue("server"))
    etcd.ctl("user", "add", "root:pass")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("auth", "enable")
    yield etcd
    etcd.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    with small_nodes() as small:

        def start(etcd: RealEtcd, *files: str, **settings: Any) -> Node:
            known = {
                "cluster": f"etcd://{etcd.endpoint}/fleet",
                "member": "n1",
                "lease_s": 2,
                "cluster_wait_s": 1.0,
            }
            return small(**{**known, **dict(zip(ETCD_FILES, files, strict=False)), **settings})

        yield start


USER: dict[str, Any] = {"etcd_user": "root", "etcd_password": "pass"}


def test_valid_certificates_and_password_work(
    start: Callable[..., Node], etcd: RealEtcd, ours: Authority
) -> None:
    assert members(start(etcd, ours.path, *ours.issue("node"), **USER, cluster_wait_s=30.0)) == [
        "n1"
    ]


def test_etcd_tls_errors_name_the_cause(
    start: Callable[..., Node], etcd: RealEtcd, ours: Authority, strangers: Authority
) -> None:
    good, old, strange = ours.issue("good"), ours.issue("old", days=-1), strangers.issue("strange")
    wrong_authority = (
        r"etcd's certificate is not valid: .* not from the authority in etcd_ca .*local issuer"
    )
    rejected = (
        "etcd does not accept this node's certificate: etcd_cert is not given, has "
        "expired, or is not from"
    )
    for files, message in (
        ((strangers.path, *good), wrong_authority),
        ((ours.path,), rejected),
        ((ours.path, *old), rejected),
        ((ours.path, *strange), rejected),
        ((), "etcd hung up; if it speaks TLS there, name the authority of its certificate"),
        (
            (ours.path, good[0], strange[1]),
            r"TLS to etcd \(etcd_ca, etcd_cert, etcd_key\): .*KEY_VALUES_MISMATCH.*good.pem",
        ),
        ((good[1], *good), r"TLS to etcd \(etcd_ca, etcd_cert, etcd_key\): .*; of .*good.key"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(etcd, *files, **USER)
    for user in (
        {**USER, "etcd_password": "wrong"},
        {"etcd_user": "nobody", "etcd_password": "pass"},
    ):
        with pytest.raises(ConfigError, match="see etcd_user, etcd_password"):
            start(etcd, ours.path, *good, **user)


def test_expired_etcd_certificate_is_named(
    start: Callable[..., Node], tmp_path: Path, ours: Authority
) -> None:
    etcd = start_etcd(tmp_path / "etcd", ours.path, *ours.issue("expires"))
    try:
        ours.issue("expires", days=-1)  # etcd reads its files for each connection
        with pytest.raises(
            ConfigError, match=r"etcd's certificate is not valid: it has expired.*has expired"
        ):
            start(etcd, ours.path, *ours.issue("good"))
    finally:
        etcd.kill()


def test_tls_to_plain_etcd_is_named(
    start: Callable[..., Node], tmp_path: Path, ours: Authority
) -> None:
    plain = RealEtcd(tmp_path / "etcd")
    try:
        with pytest.raises(ConfigError, match="etcd does not speak TLS there; leave out etcd_ca"):
            start(plain, ours.path)
    finally:
        plain.kill()


@pytest.mark.long
def test_replaced_certificates_are_used_without_a_restart(
    start: Callable[..., Node], tmp_path: Path, ours: Authority, strangers: Authority
) -> None:
    """A node reads its certificates again when both ends move to another authority."""
    files = [str(tmp_path / name) for name in ("ca.pem", "both.pem", "both.key")]

    def place(authority: Authority) -> None:
        for source, target in zip((authority.path, *authority.issue("both")), files, strict=True):
            shutil.copy(source, target)

    place(ours)
    etcd = start_etcd(tmp_path / "etcd", *files)
    try:
        node = start(etcd, *files, cluster_wait_s=30.0)
        etcd.kill()
        wait_until(lambda: "the last view stays in force" in peers(node).registry, 30.0)
        place(strangers)
        etcd.start()
        wait_until(lambda: peers(node).registry == "etcd", 30.0)
        assert members(node) == ["n1"]
        stop(node)
        assert "/members/" not in etcd.ctl("get", "--prefix", "/kvstore/fleet/")
    finally:
        etcd.kill()
