"""Measurements of decoders: validation against baselines, and latency profiles."""
