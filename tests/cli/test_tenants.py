"""The tenants in the output of `kvstore status`."""

import pytest

from kvstore import Namespace, opaque_layout
from kvstore.cli.access.tenants import show_tenants
from kvstore.results import NamespaceInfo, NodeStatus, TenantUse


def test_tenant_is_shown_with_its_quota_and_refusals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gib = 1 << 30
    uses = [
        TenantUse(
            tenant="team-a",
            ram_nbytes=gib,
            ram_quota_nbytes=2 * gib,
            pin_count=7,
            pin_quota=1000,
            refused_puts=3,
            refused_requests=1234,
        ),
        TenantUse(tenant="team-b", ram_nbytes=gib),
    ]
    space = Namespace("model", opaque_layout(512), tenant="team-a")
    pages = NamespaceInfo(space.digest, space, page_nbytes=512, page_count=11, disk_page_count=22)
    show_tenants([NodeStatus(tenants=tuple(uses), namespaces=(pages,))])
    first, second = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("team-")
    )
    assert "1.0 GiB of 2.0 GiB" in first
    assert first.split()[10:12] == ["11", "22"]
    assert "7 of 1,000" in first
    assert "3 puts, 1,234 requests" in first
    assert "of" not in second
