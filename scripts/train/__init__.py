"""A stage's life (identity, run directory, publishing, export), apart from the backends that train."""
