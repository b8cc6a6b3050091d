"""Measurements of a decoder: validation, baselines, metrics, latency profiles."""
