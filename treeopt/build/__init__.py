"""Traces to trees, in numpy alone: estimate node values, grow the tree, replay it."""
