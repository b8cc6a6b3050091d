"""The choices that pictures of trees have, in a module that loads nothing."""

LABELS = ("rank", "probability", "token", "none")  # of nodes
THEMES = ("auto", "light", "dark")
