"""What benchmarks/kills.py strikes with, and the chains that it strikes."""
