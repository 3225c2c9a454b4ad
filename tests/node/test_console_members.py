"""The console's cluster map: each member's status, as polled by the node that serves the page."""

from fleet import tell, view_of
from local_nodes import StartNode
from visits import watching


def test_cluster_map_has_each_member_and_its_error(start_node: StartNode) -> None:
    nodes = [start_node() for _ in range(3)]
    tell(nodes, view_of(nodes, elsewhere={2: "127.0.0.1:9"}))
    near = nodes[0]
    with watching(near) as events:
        for _, values in events:
            members = {member["id"]: member for member in values["cluster"]["members"]}
            if members["n1"]["status"] and members["n2"]["error"]:
                break
    assert (values["cluster"]["own"], values["cluster"]["replicas"]) == ("n0", 1)
    assert members["n0"]["status"]["ram"]["capacity_nbytes"] == near.config.ram_nbytes
    assert members["n1"]["status"]["state"] == "SERVING"
    assert members["n1"]["age_s"] >= 0.0
    assert members["n2"]["status"] is None
    sums = values["cluster"]["sums"]
    assert sums["answered"] == 2, "a member that does not answer is in no sum"
    assert sums["ram"]["capacity_nbytes"] == 2 * near.config.ram_nbytes
    assert members["n1"]["status"]["metrics_port"] == nodes[1].metrics.port
    assert (values["cluster"]["health"], values["cluster"]["lost"]) == ("red", [])
    assert {member["state"] for member in members.values()} == {"serving"}, (
        "states come from the view"
    )


def test_node_without_a_cluster_has_no_map(start_node: StartNode) -> None:
    with watching(start_node()) as events:
        assert next(events)[1]["cluster"] is None
