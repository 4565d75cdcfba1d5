"""Blends that models make: prompts, sampled responses, rewards, selected rows."""
