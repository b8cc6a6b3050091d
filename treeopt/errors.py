"""The error registry: every fault a user can meet, its number and its exit status.

    E1xx  a tree, or a tree with its heads     E4xx  the environment
    E2xx  a file                               E5xx  decoding
    E3xx  prompts, hub and data

Raise `TreeoptError(Code.X, what, ...)`; the command line prints it and exits with `Code.X.exit_status`.
"""

from __future__ import annotations

import enum
import errno
from numbers import Integral

# 0 is success, 2 a wrong command line (click's own).
EXIT_BUG = 1
EXIT_INPUT = 3
EXIT_ENVIRONMENT = 4
EXIT_NOT_LOSSLESS = 5
EXIT_BELOW = 6
EXIT_INTERRUPTED = 130

# What torch says in a RuntimeError where memory is used up.
_TORCH_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


class Code(enum.Enum):
    """Number, exit status and the rule that was broken."""

    TREE_TOO_DEEP = ("E101", EXIT_INPUT, "depth d is drafted by head d, so a tree cannot be deeper than its heads")
    RANK_TOO_LARGE = ("E102", EXIT_INPUT, "a path names ranks that were never scored")
    TREE_INVALID = ("E103", EXIT_INPUT, "a tree is a prefix-closed set of different paths of ranks from 0")
    TREE_UNKNOWN = ("E104", EXIT_INPUT, "a tree is a file of YAML or of a list of paths, or a name from `treeopt list`")
    TREE_NOT_EXPORTABLE = ("E105", EXIT_INPUT, "the layout asked for cannot hold this tree")
    FILE_MISSING = ("E201", EXIT_INPUT, "a file or folder that was named is not there")
    FILE_EXISTS = ("E202", EXIT_INPUT, "what took long to make is not overwritten unasked")
    FILE_INVALID = ("E203", EXIT_INPUT, "a file does not follow its schema")
    FILE_UNWRITABLE = ("E204", EXIT_INPUT, "the output cannot be written")
    RESUME_INVALID = ("E205", EXIT_INPUT, "a run goes on with the settings and data that it was begun with")
    PICKLE_REFUSED = ("E210", EXIT_INPUT, "only plain tensors are read from .pt files (weights_only=True)")
    HEADS_INVALID = ("E211", EXIT_INPUT, "a heads checkpoint does not have the Medusa layout")
    HEADS_MISMATCH = ("E212", EXIT_INPUT, "the heads were not made for this base model")
    CALIBRATION_INVALID = ("E220", EXIT_INPUT, "a calibration breaks one of its own rules")
    CALIBRATION_MISMATCH = (
        "E221",
        EXIT_INPUT,
        "ranks of other models, heads, drafters or settings do not count together",
    )
    DRAFTER_INVALID = ("E222", EXIT_INPUT, "a drafter breaks one of its own rules")
    DRAFTER_MISMATCH = ("E223", EXIT_INPUT, "traces and trees hold for the drafter that they were made with")
    PROFILE_INVALID = ("E230", EXIT_INPUT, "a latency profile holds positive seconds, once for each size")
    HUB_UNREACHABLE = ("E301", EXIT_ENVIRONMENT, "not on this machine, and the hub cannot be reached")
    PROMPTS_INVALID = ("E302", EXIT_INPUT, "prompts need `messages`, `turns`, `instruction`, `prompt` or `text`")
    PROMPTS_EMPTY = ("E303", EXIT_INPUT, "no prompt was left to run")
    MODEL_INVALID = ("E304", EXIT_INPUT, "the base model cannot be loaded")
    PROGRAM_MISSING = ("E401", EXIT_ENVIRONMENT, "a program that was asked for is not installed")
    OUT_OF_MEMORY = ("E403", EXIT_ENVIRONMENT, "this machine has too little memory or disk for it")
    SYSTEM_REFUSED = ("E404", EXIT_ENVIRONMENT, "the operating system refused to read or write something")
    DEVICE_UNUSABLE = ("E402", EXIT_ENVIRONMENT, "the device that was asked for is not usable here")
    NOT_LOSSLESS = ("E501", EXIT_NOT_LOSSLESS, "tree decoding must give the text of plain greedy decoding")
    BELOW_THRESHOLD = ("E505", EXIT_BELOW, "a figure must not be below the least that was asked for")
    NO_TREES = ("E502", EXIT_INPUT, "this model cannot verify a tree in one forward pass")
    CONTEXT_FULL = ("E503", EXIT_INPUT, "prompt and new tokens must fit into the model's context")
    NOT_FINITE = ("E504", EXIT_INPUT, "a model or its heads gave something that is not a number")
    GENERATE_UNSUPPORTED = ("E510", EXIT_INPUT, "tree_generate stands in for greedy and sampling generate")

    def __init__(self, number: str, exit_status: int, rule: str) -> None:
        self.number = number
        self.exit_status = exit_status
        self.rule = rule


class TreeoptError(Exception):
    """One fault, in the four parts that a user needs.

    Args:
        code: which fault; decides the exit status.
        what: what is wrong, with the values.
        at: where: `file:line:column`, an option, or several of them, one a line.
        why: the rule in one sentence; the code's own rule where empty.
        fix: a command or an edit that works.
    """

    def __init__(self, code: Code, what: str, *, at: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.at = at
        self.why = why or code.rule
        self.fix = fix

    @property
    def exit_status(self) -> int:
        return self.code.exit_status

    def as_dict(self) -> dict[str, str | int]:
        """The parts under the names that `--json` prints."""
        parts = {"what": self.what, "at": self.at, "why": self.why, "fix": self.fix}
        return {"error": self.code.number, **parts, "exit_status": self.exit_status}

    def __str__(self) -> str:
        # A name from outside may hold a line end, which must not look like a line of ours.
        lines = [f"error[{self.code.number}]: {_one_line(self.what)}"]
        for name, text in (("at", self.at), ("why", _one_line(self.why)), ("fix", _one_line(self.fix))):
            if text:
                first, *rest = text.splitlines()
                lines.append(f"  {name + ':':4} {first}")
                lines.extend(f"       {line}" for line in rest)
        return "\n".join(lines)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def check_counts(**counts: int) -> None:
    """Raise ValueError, by its name, for a number that is not whole or is below 1."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} {value!r}: it is a whole number from 1")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was used up: Python's, or torch's on the CPU or a device."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_MEMORY)
    )


def system_error(error: Exception) -> TreeoptError | None:
    """What the system refused, as our error: E403 where memory, disk or quota is used up, else E404.

    None for an exception that no lack of memory and no system call raised.
    """
    if out_of_memory(error):
        what = "out of memory" if isinstance(error, MemoryError) and not str(error) else first_line(error)
        return TreeoptError(Code.OUT_OF_MEMORY, what, fix="ask for less, or use more memory")
    if not isinstance(error, OSError) or error.errno is None:
        return None
    at = "" if error.filename is None else str(error.filename)
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return TreeoptError(Code.OUT_OF_MEMORY, what, at=at, fix="make room, or write elsewhere")
    return TreeoptError(Code.SYSTEM_REFUSED, what, at=at)


def first_line(error: BaseException) -> str:
    """What a foreign exception says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
