"""Modules of this folder are found by its tests."""
