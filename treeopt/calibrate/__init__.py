"""Prompts and a drafter to a calibration: encode, answer, learn, trace."""
