"""What numba compiles for drafting, and the sessions over it."""
