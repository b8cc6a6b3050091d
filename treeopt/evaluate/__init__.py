"""Measurements of a decoder: validation against baselines, and latency profiles."""
