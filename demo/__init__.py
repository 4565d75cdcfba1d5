"""The rows of the tiny recipes: small tasks that a byte-level model learns in minutes, published as real blends are."""
