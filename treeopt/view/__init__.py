"""Pictures: trees as SVG, DOT and text, and charts as SVG."""
