"""Prompts to the base model's own text: prompts, token ids, answers, sampled texts, hidden states."""
