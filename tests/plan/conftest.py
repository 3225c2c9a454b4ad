"""Make the modules of this folder importable by its tests."""
