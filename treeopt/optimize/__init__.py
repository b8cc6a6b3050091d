"""Traces to a tree or a policy (numpy, no torch): node values, growth, replay, selection, intervals."""
