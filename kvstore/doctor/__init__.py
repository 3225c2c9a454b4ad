"""What is wrong with a deployment, seen from where this runs: small checks, each with what it found and what to do.

in: a client's settings; out: groups of checks, whose findings `kvstore doctor` shows. Nothing stays behind.

    examination.py   which checks, in which order; what one finds out the next ones use
    finding.py       what a check found; check.py: how it is run: abreast, each for so long at most
    host.py          this host; settings.py: files and secrets of this client
    way.py           to one node: name, TCP, TLS, gRPC
    member.py        what a node tells of itself; cluster.py: what members tell of each other
    wires.py         which wires to a node work from here
    pages.py         pages that are put, read back, compared and removed
    hints.py         why nothing hits, by namespaces and their counters
    probe.py         checks in a process of their own; directory.py: one of a data directory
"""
