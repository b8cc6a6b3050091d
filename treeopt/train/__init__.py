"""Heads of one's own: text from the base model (distill), Medusa-1 training, and the recipe of the built-in model."""
