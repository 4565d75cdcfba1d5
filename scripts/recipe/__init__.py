"""Recipes, stages and sites as typed models: load, validate, resolve. Imports nothing of ours but the errors."""
