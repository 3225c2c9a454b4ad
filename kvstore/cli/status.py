"""`kvstore status`: a node, or the members of a cluster."""

from kvstore.cli.cluster import show_cluster_status
from kvstore.cli.invocation import Invocation
from kvstore.cli.nodes import show_status


def status(run: Invocation) -> None:
    """Show the node, its tiers and its namespaces; of a cluster its members, and namespaces over all of them.

    A cluster is one screen; `kvstore cluster` has all members, and exit 3 if one does not answer.

    Misses are counted by reason. A namespace that never hits gets a hint: usually its layout,
    revision, data type, TP size or salt differs from that of the namespace that holds the pages.

    \b
    Examples:
      kvstore status
      kvstore status -a node7:7440 --json | jq .ram.used_nbytes
      KVSTORE_DIRECT=1 kvstore status -a node7:7440      one member of a cluster alone
    """
    with run.client() as client:
        if client.view() is None:
            show_status(run, client)
        else:
            show_cluster_status(run, client)
