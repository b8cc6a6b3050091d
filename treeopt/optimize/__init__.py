"""Node values, growth, replay, method selection and intervals: rank traces to a tree or a policy, without torch."""
