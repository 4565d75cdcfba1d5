"""Recipes, stages and sites as typed models: load, validate, resolve."""
