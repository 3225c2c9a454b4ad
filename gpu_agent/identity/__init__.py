"""Whose bytes: what of an engine's configuration decides what a page holds.

In come an engine's arguments as plain values, out go an `Identity` with its weights named and the
facts of a namespace. No engine is imported here, so that every claim of docs/identity.md is tested
without one.
"""
