"""Trees for people: SVG, DOT and plain text."""
