"""The storage node: a server that keeps pages. Never imported by an engine's environment."""
