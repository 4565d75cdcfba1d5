"""Backend `nemo_rl`: NeMo-RL in containers under Slurm."""
