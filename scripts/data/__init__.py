"""Training data: synthesize or download, fill placeholders, split, validate."""
