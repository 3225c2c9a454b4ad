"""The identities file: valid lines, refused lines and their messages, and edits by commands."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import ConfigError, InvalidRequest
from kvstore.security.identities import (
    ALL,
    LINES_MAX,
    Identities,
    Role,
    add,
    certificate_line,
    expiry_text,
    new_token,
    parse,
    read,
    revoke,
    token_hash,
    token_line,
)

HASH = "ab" * 32


def only(text: str) -> Identities:
    found = parse(text)
    assert found.problems == []
    return found


def test_token_is_found_by_its_hash() -> None:
    token = new_token("team-a")
    found = only(
        "# engines\n\n"
        + token_line("ci", token, tenant="team-a", role="write")
        + "  # of the cluster"
    )
    principal = found.tokens[token_hash(token)]
    assert (principal.name, principal.tenant, principal.role) == ("ci", "team-a", Role.WRITE)
    assert principal.expires_s == math.inf
    assert token_hash(token + "x") not in found.tokens
    assert token.startswith("team-a.")
    assert len(token) == len("team-a.") + 43
    assert new_token("team-a") != token
    assert "." not in new_token(ALL)


def test_expiry_is_written_as_it_is_read() -> None:
    for text in ("2027-01-01T00:00:00Z", "9999-12-31T23:59:59Z", ""):
        line = token_line("ci", new_token("team-a"), tenant="team-a", role="write", expires=text)
        [principal] = only(line).tokens.values()
        assert expiry_text(principal.expires_s) == text


def test_certificate_is_found_by_its_name() -> None:
    found = only(
        "certificate spiffe://prod/gpu-7 tenant=* role=node expires=2027-01-01T00:00:00+01:00"
    )
    principal = found.certificates["spiffe://prod/gpu-7"]
    assert (principal.role, principal.of_all, principal.expires_s) == (
        Role.NODE,
        True,
        1798758000.0,
    )


def test_models_limit_an_identity() -> None:
    principal = only(f"token ci tenant=team-a role=read models=llama-*,qwen hash={HASH}").tokens[
        bytes.fromhex(HASH)
    ]
    assert [principal.owns("team-a", model) for model in ("llama-3", "qwen", "qwen-2", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert not principal.owns("team-b", "qwen")
    assert not principal.of_all


def test_share_lets_another_tenant_read() -> None:
    found = only(
        f"share team-a models=prompts-* with=team-b\ntoken b tenant=team-b role=read hash={HASH}"
    )
    [share], [reader] = found.shares, found.tokens.values()
    assert share.lets(reader, "team-a", "prompts-1")
    assert not share.lets(reader, "team-a", "llama")
    assert not share.lets(reader, "team-c", "prompts-1")
    narrow = replace(reader, models=("prompts-2",))
    assert share.lets(narrow, "team-a", "prompts-2")
    assert not share.lets(narrow, "team-a", "prompts-1"), (
        "the models of an identity do not limit what is shared with it"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("password ci", "begin it with token"),
        ("token", "begin it with token"),
        ("token ci tenant=team-a role=write", "hash must be the 64 digits"),
        ("token ci tenant=team-a role=write hash=SECRET", "hash must be the 64 digits"),
        (
            f"token ci tenant=team-a role=king hash={HASH}",
            "role must be one of read, write, node, admin",
        ),
        (f"token ci role=read hash={HASH}", "a tenant's name is"),
        (f"token ci tenant=-x role=read hash={HASH}", "a tenant's name is"),
        (f"token ci tenant=team-a role=node hash={HASH}", "a node is of all tenants"),
        (f"token ci tenant=team-a role=read rol=x hash={HASH}", "1 of its fields are unknown"),
        (f"token ci tenant=team-a tenant=team-b role=read hash={HASH}", "a field twice"),
        (f"token ci tenant=team-a role=read stray hash={HASH}", "field=value"),
        (
            f"token ci tenant=team-a role=read expires=tomorrow hash={HASH}",
            "expires must be a time",
        ),
        (
            f"token ci tenant=team-a role=read expires=9999-12-31T23:00-05:00 hash={HASH}",
            "expires must be a time",
        ),
        (f"token gé tenant=team-a role=read hash={HASH}", "printable"),
        ("share team-a models=x", "a share has models= and with="),
        ("share team-a models=x with=,", "a share has models= and with="),
        ("tenant a/b ram=1GiB", "a tenant's name is"),
    ],
)
def test_invalid_line_is_reported_by_number_without_its_content(line: str, message: str) -> None:
    good = f"token good tenant=team-a role=read hash={'cd' * 32}"
    found = parse(f"{good}\n\n{line}\n")
    [problem] = found.problems
    assert problem.startswith("line 3: ")
    assert message in problem
    assert not [
        word for word in ("SECRET", "king", "tomorrow", "gé", "a/b", HASH) if word in problem
    ]
    assert [principal.name for principal in found.tokens.values()] == ["good"]


def test_duplicate_names_and_hashes_are_refused() -> None:
    line = f"token a tenant=team-a role=read hash={HASH}"
    found = parse(
        f"{line}\ntoken a tenant=team-a role=admin hash={'cd' * 32}\ntoken b tenant=x role=admin "
        f"hash={HASH}"
    )
    assert found.problems == [
        "line 2: its name stands in line 1 already",
        "line 3: its hash stands in another line already",
    ]
    assert found.tokens[bytes.fromhex(HASH)].role is Role.READ


def test_quotas_are_checked_by_a_given_function() -> None:
    def check(fields: object) -> None:
        raise ConfigError("ram must be a size")

    found = parse("tenant team-a ram=lots", check)
    assert (found.problems, found.quotas) == (["line 1: ram must be a size"], {})
    assert only("tenant team-a ram=1GiB").quotas == {"team-a": {"ram": "1GiB"}}


def test_adding_and_revoking_lines_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "identities"
    add(path, token_line("a", new_token("x"), tenant="x", role="read"))
    path.write_text("# mine\n" + path.read_text() + "nonsense\n")
    path.chmod(0o600)
    add(path, certificate_line("a", tenant="x", role="read"))
    add(path, token_line("b", new_token("x"), tenant="x", role="admin"))
    with pytest.raises(InvalidRequest, match="has a token named a already"):
        add(path, token_line("a", new_token("x"), tenant="x", role="read"))
    assert revoke(path, "a") == 2
    assert revoke(path, "a") == 0
    lines = path.read_text().splitlines()
    assert (lines[0], lines[1], lines[2].split()[:2]) == ("# mine", "nonsense", ["token", "b"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert [some.name for some in tmp_path.iterdir()] == ["identities"]
    assert len(read(path).problems) == 1


@pytest.mark.parametrize("name", ["a b", "a#b", "", "a\nb"])
def test_name_that_breaks_the_line_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="can not be an identity"):
        token_line(name, new_token("x"), tenant="x", role="read")


@pytest.mark.parametrize("field", ["x role=admin", "x\nshare y models=* with=*", "*,x"])
def test_field_that_breaks_the_line_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match="can not be an identity"):
        token_line("a", new_token("x"), tenant=field, role="read")


@pytest.mark.parametrize("mark", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_commented_identity_stays_disabled_when_a_line_is_added(tmp_path: Path, mark: str) -> None:
    """A line added to the file does not enable an identity in a comment.

    Python's `splitlines` ends a line at such a mark; a node does not.
    """
    path = tmp_path / "identities"
    hidden = token_line("old", new_token(ALL), tenant=ALL, role="admin")
    path.write_text(f"# until spring:{mark}{hidden}\n", newline="")
    assert not read(path).tokens
    add(path, token_line("ci", new_token("x"), tenant="x", role="read"))
    assert [principal.name for principal in read(path).tokens.values()] == ["ci"]
    assert revoke(path, "ci") == 1
    assert path.read_bytes().decode() == f"# until spring:{mark}{hidden}\n"


def test_change_through_a_link_changes_its_target(tmp_path: Path) -> None:
    """A change through a link changes its target, which a node may read by its own name.

    Replacing the link would leave revoked identities in the target.
    """
    path, link = tmp_path / "identities", tmp_path / "link"
    link.symlink_to(path)
    add(link, certificate_line("a", tenant="x", role="read"))
    assert list(read(path).certificates) == ["a"]
    assert revoke(link, "a") == 1
    assert not read(path).certificates
    assert link.is_symlink()


def test_lines_beyond_the_limit_are_reported() -> None:
    line = certificate_line("a", tenant="x", role="read")
    assert parse(f"{line}\n" + "\n" * (LINES_MAX - 1)).problems == []
    problems = parse("\n" * LINES_MAX + line).problems
    assert problems == [
        f"line {LINES_MAX + 1} and those behind it: a file has {LINES_MAX} lines at most"
    ]


def test_unreadable_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        add(tmp_path / "nowhere" / "identities", certificate_line("a", tenant="x", role="read"))
    with pytest.raises(ConfigError, match="absent can not be read"):
        read(tmp_path / "absent")
