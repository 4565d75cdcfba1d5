"""What Stagecoach adds to Snakemake and its Slurm plugin, pinned to their versions."""
