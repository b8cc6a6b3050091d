"""Trees to and from the formats of inference engines, and the rules of each engine."""
