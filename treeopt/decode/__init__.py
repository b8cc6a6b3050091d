"""The decoding loop: draft, verify, accept, keep; acceptance rules, `tree_generate`, streaming."""
