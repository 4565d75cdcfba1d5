"""The environments, found by `scripts.rewards.registry`: contracts of rows and verifiers of responses."""
