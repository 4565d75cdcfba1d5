"""Stagecoach's programs: each module with a command line runs alone, as ``python -m scripts.data.fill --help``."""

import gc

# What imports make stays; looking through it after every 700 new objects takes a quarter of a program's start.
gc.set_threshold(50_000)
