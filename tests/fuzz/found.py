"""Inputs that were found once, and are refused now: (target, input, what came of it)."""

FOUND: list[tuple[str, bytes, str]] = []
