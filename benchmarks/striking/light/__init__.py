"""Backend `light`: a training without torch, for benchmarks of what surrounds it."""
