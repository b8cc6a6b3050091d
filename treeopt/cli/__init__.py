"""The command line: a command parses, calls one library function, prints. It holds no logic that the library lacks."""

from treeopt.cli.app import main

__all__ = ["main"]
