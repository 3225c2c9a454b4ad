"""`kvstore top`: rates of nodes, live, with keys on a terminal."""
