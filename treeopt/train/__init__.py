"""Training of draft heads: self-distillation, Medusa-1, and the recipe of the built-in model."""
