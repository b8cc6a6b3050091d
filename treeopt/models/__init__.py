"""A model that can draft: the stock base model, its tree forward and cache, and its heads (torch, transformers)."""
