"""Backend `plain`: supervised fine-tuning by a loop of PyTorch, with plain gradient descent."""
