"""Tree to tensors to tokens: compile, propose, verify, accept, and prove that nothing is lost."""
