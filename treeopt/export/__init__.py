"""Trees, heads and settings to and from inference engines, and the rules of each engine."""
