"""Decide which of an engine's settings determine the bytes of a page.

Input are an engine's arguments as plain values, output are an `Identity` with its weights named and
the facts of a namespace. No engine is imported here, so that every claim of docs/identity.md is
tested without one.
"""
