"""Adapt engines, one thin file each; an engine's package is imported nowhere else."""
