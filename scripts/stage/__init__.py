"""A stage: where its files lie, what it trains, how far it is; run directory, checkpoints, publishing."""
