"""One file an environment, found by `scripts.rewards.registry`: what its rows hold, and how responses are rewarded."""
