"""The base model, a stock model of transformers, and its Medusa heads."""
