"""What Stagecoach adds to Snakemake and its Slurm plugin, pinned to their versions; `prepare` is the way in."""
