"""Prompts to traces: continue the prompts with the base model, then rank every token under every head."""
