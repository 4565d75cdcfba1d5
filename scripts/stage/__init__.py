"""A stage: files, identity, the store of trainings, checkpoints, publishing, state."""
