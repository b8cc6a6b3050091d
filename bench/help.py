"""Time until `--help` of every command is printed, beside that of an empty Python program and of `import click`.

python bench/help.py
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys

from timing import add_tiny, goal_line, interleaved, machine

from treeopt.cli.app import COMMANDS

GOAL = 0.3  # seconds
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tiny(parser)
    options = parser.parse_args()
    commands = list(COMMANDS)[:2] if options.tiny else list(COMMANDS)
    programs = {"python -c pass": ["-c", "pass"], "import click": ["-c", "import click"]}
    programs |= {f"treeopt {name} --help": ["-m", "treeopt", name, "--help"] for name in commands}
    print(f"{machine(1)}; seconds of a program, and ratios to {' and '.join(list(programs)[:2])}")
    runs = {label: functools.partial(run, arguments) for label, arguments in programs.items()}
    seconds = interleaved(runs, repeats=1 if options.tiny else REPEATS)
    nothing, click = (seconds.pop(name) for name in list(programs)[:2])
    print(f"python -c pass {nothing:.3f}  import click {click:.3f}")
    for label, value in seconds.items():
        print(f"{label:28} {value:.3f}  {value / nothing:5.1f}  {value / click:5.1f}")
    slowest = max(seconds, key=lambda label: seconds[label])
    print(goal_line(f"the slowest, {slowest}", seconds[slowest], GOAL, "s"))


def run(arguments: list[str]) -> None:
    """Run Python with these arguments."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
