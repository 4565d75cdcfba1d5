"""Slurm allocations, Ray clusters over them, command lines of what runs there."""
