"""Rewards: one verifier for each environment, keyed by the agent name that a row bears."""
