"""What trains stages: one package each."""
