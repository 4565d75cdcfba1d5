"""Held-out scores and the gate."""
