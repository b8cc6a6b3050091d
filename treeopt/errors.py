"""The error registry: every error shown to users, with its number and exit status.

    E1xx  a tree, or a tree with its heads     E4xx  the environment
    E2xx  a file                               E5xx  decoding
    E3xx  prompts, hub and data

Raise `TreeoptError(Code.X, what, ...)`; the command line prints it and exits with `Code.X.exit_status`.
"""

import enum
import errno
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

# 0 is success; 2 is a wrong command line (from click).
EXIT_BUG = 1
EXIT_INPUT = 3
EXIT_ENVIRONMENT = 4
EXIT_NOT_LOSSLESS = 5
EXIT_BELOW = 6
EXIT_INTERRUPTED = 130

# Texts of the RuntimeErrors that torch raises where memory is used up.
_TORCH_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Texts of errors without a number, of safetensors and torch.save, where a disk is full.
_DISK_FULL_MESSAGES = (
    *("No space left on device", "os error 28", "Disk quota exceeded", "os error 122"),
    *("inline_container", "PytorchStreamWriter", "iostream error"),
)

# Number -> exit status, where it is not EXIT_ENVIRONMENT for E4xx and EXIT_INPUT for others.
_STATUSES = {"E301": EXIT_ENVIRONMENT, "E501": EXIT_NOT_LOSSLESS, "E505": EXIT_BELOW, "E506": EXIT_BELOW}
# Number -> what to do, where a message has no remedy of its own.
_FIXES = {
    "E101": "build again with a smaller --max-depth, or use heads with as many levels",
    "E102": "build with a smaller --max-rank",
    "E103": "remove or add the path that the message names; treeopt build makes a tree",
    "E104": "treeopt list prints the names",
    "E105": "another engine in --for; treeopt show TREE --for ENGINE prints the rules",
    "E106": "give --calibration",
    "E107": "--label rank, or --example PROMPT for tokens",
    "E201": "check the path, or make the file with the command that writes it",
    "E202": "choose another name with -o, or overwrite it with --force",
    "E203": "correct the file at this place, restore it from a copy, or make it again",
    "E204": "choose another name with -o, in a folder that exists and can be written to",
    "E205": "the settings of the first run, or --force instead of --resume",
    "E206": "export the tree from the engine again",
    "E207": "--map OLD=NEW with the inputs of that time, or make the file again",
    "E210": "convert the file to safetensors",
    "E211": "use a folder or file of Medusa heads: treeopt heads show HEADS names what is missing",
    "E212": "name with --model the base that the heads were trained for",
    "E213": "a draft model of the same family",
    "E214": "name the base and the heads that the adapter was trained with",
    "E215": "another engine in --for",
    "E216": "docs/develop/formats.md lists the layouts of draft modules",
    "E220": "calibrate again",
    "E221": "calibrate with the same model, heads, drafter and settings",
    "E222": "treeopt learn again",
    "E223": "give the drafter that the message names with --drafter FILE",
    "E224": "give every shard that calibrate --shard wrote, and make the missing ones",
    "E230": "treeopt profile, with the sizes, batches and contexts that the message names",
    "E240": "treeopt plan --presets lists shapes and devices",
    "E301": "download the model or data on a machine with a network, and name its folder",
    "E302": "write one of these keys in every row",
    "E303": "use more or other prompts: a larger --limit, a smaller --skip, shorter prompts",
    "E304": "use the files of one model that transformers loads, unchanged",
    "E401": "install the program or package that the message names",
    "E402": "another --device",
    "E403": "use a smaller --batch-size (auto halves it), or free some disk space",
    "E404": "check the permissions and the disk of the path that the message names",
    "E405": "the same command again, with --resume where it has it; fewer processes (--nproc) where memory was used up",
    "E406": "the same models, versions and threads everywhere, and an output in a folder that all machines see",
    "E501": "report it with the prompt: it is a bug of treeopt, or of the kernel that the message names",
    "E502": "use one of the supported models, which docs/models.md lists",
    "E503": "use a smaller --max-new-tokens, shorter prompts, or a smaller tree",
    "E504": "use another --dtype, or another copy of the weights",
    "E505": "use a better tree, or another minimum",
    "E506": "what differs is printed: versions, device, threads, or a run that is not deterministic",
    "E510": "remove the option that the message names",
}


class Code(enum.Enum):
    """All errors: number, exit status, the rule that is broken, and what to do."""

    TREE_TOO_DEEP = "E101", "depth d is drafted by head d, so a tree is at most as deep as there are heads"
    RANK_TOO_LARGE = "E102", "a path contains ranks that were not measured"
    TREE_INVALID = "E103", "a tree is a prefix-closed set of distinct paths of ranks from 0"
    TREE_UNKNOWN = "E104", "a tree is a file of YAML or of a list of paths, or a name from `treeopt list`"
    TREE_NOT_EXPORTABLE = "E105", "the layout cannot represent this tree"
    PATH_UNKNOWN = "E106", "a path is explained by the values in its tree's file, or by traces"
    LABEL_UNKNOWN = "E107", "a picture has labels that its tree or its step has"
    FILE_MISSING = "E201", "a file or folder does not exist"
    FILE_EXISTS = "E202", "files that took long to make are overwritten only with --force"
    FILE_INVALID = "E203", "a file does not follow its schema"
    FILE_UNWRITABLE = "E204", "the output cannot be written"
    RESUME_INVALID = "E205", "a run is resumed with the settings and data that it was started with"
    ENGINE_FILE_INVALID = "E206", "a tree of an engine is read only where all parts of its file agree"
    INPUT_CHANGED = "E207", "a file is made again, and compared, from the inputs that it was made from"
    PICKLE_REFUSED = "E210", "only plain tensors are read from .pt files (weights_only=True)"
    HEADS_INVALID = "E211", "a heads checkpoint does not have the Medusa layout"
    HEADS_MISMATCH = "E212", "the heads do not fit this base model"
    HEADS_NOT_EXPORTABLE = "E215", "the layout cannot represent these heads"
    DRAFT_MISMATCH = "E213", "a draft model has the base's tokenizer, a draft module its base's sizes"
    DRAFT_INVALID = "E216", "a draft module has the tensors of its layout"
    ADAPTER_MISMATCH = "E214", "an adapter belongs to the base and the heads that it was trained with"
    CALIBRATION_INVALID = "E220", "the values of a calibration are inconsistent"
    CALIBRATION_MISMATCH = "E221", "ranks of different models, heads, drafters or settings cannot be merged"
    DRAFTER_INVALID = "E222", "the values of a drafter are inconsistent"
    DRAFTER_MISMATCH = "E223", "traces and trees are valid for the drafter that they were made with"
    SHARDS_INCOMPLETE = "E224", "all shards of one run are merged, each once"
    PROFILE_INVALID = "E230", "a latency profile has positive seconds, one value for each size"
    PLAN_INVALID = "E240", "the hardware model takes known shapes and devices, and positive numbers"
    HUB_UNREACHABLE = "E301", "not on this machine, and the hub cannot be reached"
    PROMPTS_INVALID = "E302", "prompts need `messages`, `turns`, `instruction`, `prompt` or `text`"
    PROMPTS_EMPTY = "E303", "there is no prompt to run"
    MODEL_INVALID = "E304", "the model cannot be loaded"
    PROGRAM_MISSING = "E401", "a required program or package is not installed"
    OUT_OF_MEMORY = "E403", "this machine has too little memory or disk space"
    SYSTEM_REFUSED = "E404", "the operating system refused to read or write something"
    PROCESS_ENDED = "E405", "a run of several processes ends with the first of them that fails"
    PROCESSES_DIFFER = "E406", "all processes of a run have one setting and share one folder"
    DEVICE_UNUSABLE = "E402", "the device cannot be used on this machine"
    NOT_LOSSLESS = "E501", "tree decoding must give the text of greedy decoding"
    NOT_REPRODUCED = "E506", "on one machine a file is made again with the same bytes, except for seconds"
    BELOW_THRESHOLD = "E505", "a metric is below its minimum"
    NO_TREES = "E502", "this model cannot verify a tree in one forward pass"
    CONTEXT_FULL = "E503", "prompt and new tokens must fit into the model's context"
    NOT_FINITE = "E504", "outputs of a model or its heads are not finite"
    GENERATE_UNSUPPORTED = "E510", "tree_generate supports greedy search and sampling"

    def __init__(self, number: str, rule: str) -> None:
        self.number, self.rule, self.fix = number, rule, _FIXES[number]
        self.exit_status = _STATUSES.get(number, EXIT_ENVIRONMENT if number.startswith("E4") else EXIT_INPUT)

    @property
    def cause(self) -> str:
        """The kind of error in a few words, such as `file missing`."""
        return self.name.lower().replace("_", " ")


class TreeoptError(Exception):
    """An error for users: what is wrong, the place, the rule and a remedy.

    Args:
        code: the error; it has the exit status.
        what: the error in one sentence, with the values.
        at: where: `file:line:column`, an option, or several of them, one a line.
        why: the rule in one sentence; the rule of `code` where empty.
        fix: a command or an edit that works; the fix of `code` where empty.
    """

    def __init__(self, code: Code, what: str, *, at: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.at = at
        self.why = why or code.rule
        self.fix = fix or code.fix

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), at=self.at, why=self.why, fix=self.fix), (self.code, self.what)

    @property
    def exit_status(self) -> int:
        return self.code.exit_status

    def as_dict(self) -> dict[str, str | int]:
        """The parts, as printed with `--json`."""
        parts = {"what": self.what, "at": self.at, "why": self.why, "fix": self.fix}
        return {"error": self.code.number, **parts, "exit_status": self.exit_status}

    def __str__(self) -> str:
        # A name may contain a line end, which must not look like one of the four parts.
        lines = [f"error[{self.code.number}]: {_one_line(self.what)}"]
        for name, text in (("at", self.at), ("why", _one_line(self.why)), ("fix", _one_line(self.fix))):
            if text:
                first, *rest = text.splitlines()
                lines.append(f"  {name + ':':4} {first}")
                lines.extend(f"       {line}" for line in rest)
        return "\n".join(lines)


def error_of(parts: Mapping[str, Any]) -> TreeoptError:
    """The error whose parts `TreeoptError.as_dict` gave."""
    code = next(code for code in Code if code.number == parts["error"])
    return TreeoptError(code, parts["what"], at=parts["at"], why=parts["why"], fix=parts["fix"])


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def check_counts(least: int = 1, /, **counts: int) -> None:
    """Raise ValueError, with its name, for a number that is not whole or is below `least`."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} {value!r}: it is not a whole number from {least}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError, with its name and the choices, for a value that is none of them."""
    listed = tuple(choices)
    if value not in listed:
        raise ValueError(f"{name} {value!r}: it is one of {', '.join(listed)}")


def counted(number: int, noun: str) -> str:
    """`1 leaf`, `2 leaves`, `16 nodes`."""
    plural = "leaves" if noun == "leaf" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory is used up: MemoryError, or that of torch on the CPU or a device."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_MEMORY)
    )


@contextmanager
def memory_as_error(fix: str) -> Iterator[None]:
    """Raise E403 where the block runs out of memory, on the CPU or on a device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise TreeoptError(Code.OUT_OF_MEMORY, first_line(error), fix=fix) from error


def disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        if not isinstance(error, TreeoptError) and any(message in str(error) for message in _DISK_FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def system_error(error: Exception) -> TreeoptError | None:
    """An error of the system as ours, if it is one: E403 where memory, disk or quota is used up, else E404."""
    if out_of_memory(error):
        what = "out of memory" if isinstance(error, MemoryError) and not str(error) else first_line(error)
        return TreeoptError(Code.OUT_OF_MEMORY, what, fix="use smaller values, or a machine with more memory")
    found = error if isinstance(error, OSError) else None
    if number := re.search(r"\(os error (\d+)\)", str(error)):  # of a library in Rust, such as safetensors
        found = found or OSError(int(number[1]), os.strerror(int(number[1])))
    if found is None or found.errno is None:
        return None
    at = "" if found.filename is None else str(found.filename)
    what = found.strerror or str(found)
    if found.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return TreeoptError(Code.OUT_OF_MEMORY, what, at=at, fix="free some space, or write elsewhere")
    return TreeoptError(Code.SYSTEM_REFUSED, what, at=at)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
