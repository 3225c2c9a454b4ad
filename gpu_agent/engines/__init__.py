"""One thin adapter file per engine; the engine's package is imported there and nowhere else."""
