"""The tokens of a tree's nodes: drafters, their scores, per-step trees, learning and tracing."""
