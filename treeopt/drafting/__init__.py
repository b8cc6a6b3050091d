"""Which tokens a tree's nodes hold: drafters, their scores, per-step trees, what they learn, and their traces."""
