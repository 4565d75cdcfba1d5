"""Stagecoach's programs: each module with a command line runs alone, as ``python -m scripts.data.fill --help``."""
