"""Drafting in numpy, level by level: the oracle of the compiled kernel, and what the benches compare it with."""
