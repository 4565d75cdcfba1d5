"""Figures and tables of a run; reads the files that the stages published and nothing else."""
