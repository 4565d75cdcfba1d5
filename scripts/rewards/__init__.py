"""Rewards: environments, NeMo-Gym's servers, the sandbox."""
