"""Models in Hugging Face's format: made with random weights, loaded, checked."""
