"""Check a deployment, as seen from where this runs.

Each check says what it found and what to do.

in: a client's settings; out: groups of checks, whose findings `kvstore doctor` shows. Nothing stays
behind.

    runner.py         which checks, in which order; what one finds out the next ones use
    checks.py         findings, and how checks are run: in parallel, each for a limited time
    host.py           this host, and the settings of this client
    connectivity.py   to one node: name, TCP, TLS, gRPC, and which wires work from here
    members.py        what a node tells of itself, and what the members of a cluster tell of each
                      other
    pages.py          pages put, read back, compared and removed; why nothing hits
    data_dir.py       a data directory, in a process of its own
"""
