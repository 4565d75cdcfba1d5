"""Programs of a stage's rules: preflight, training, export."""
