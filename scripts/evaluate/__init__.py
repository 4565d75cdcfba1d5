"""Held-out scores, tasks, gates and choices."""
