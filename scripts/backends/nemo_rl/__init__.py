"""Backend `nemo_rl`: NeMo-RL in its containers under Slurm."""
