"""Prompts, their token ids, the base model's answers to them, and hidden states of the answers."""
