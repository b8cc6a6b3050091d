"""The command line: a command parses, calls one library function, prints. It holds no logic that the library lacks."""

import sys


def main() -> None:
    """The program `treeopt`. Ctrl-C ends it with status 130, from its first import on."""
    try:
        from treeopt.cli.app import run

        run()
    except KeyboardInterrupt as error:
        from treeopt.cli.processes import follows
        from treeopt.errors import EXIT_INTERRUPTED

        if not (error.args or follows()):  # else the command has said what --resume continues
            sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
