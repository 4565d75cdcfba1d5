"""Rows of data: JSONL, requests, messages, prompts and the chat format."""
