"""Check a deployment, as seen from where this runs.

Each check says what it found and how to fix it. No test data stays behind.

    runner.py         chooses the checks and their order; later checks use earlier results
    checks.py         findings, and how checks run: in parallel, each with a time limit
    host.py           this host, and this client's settings
    connectivity.py   the connection to one node: name, TCP, TLS, gRPC, and each transport
    members.py        what nodes report about themselves and about each other
    pages.py          pages put, read back, compared and removed; why nothing hits
    data_dir.py       a data directory, in a process of its own
"""
