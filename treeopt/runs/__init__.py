"""Runs: the batches of long work, stored, resumed, and divided among processes and jobs."""
