"""One forward pass over a tree of drafts on a stock model: the compiled tree, masks, cache, session, probe."""
