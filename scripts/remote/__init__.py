"""Trainings in a remote store."""
