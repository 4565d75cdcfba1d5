"""Rows of the tiny recipes: small tasks for a byte-level model, published like real blends."""
