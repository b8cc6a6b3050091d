"""What a shell offers for the value of an option: bundled names, and files of a kind. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

_FILES = (
    *("calibration", "calibrations", "profile", "responses", "data", "adapter", "output", "csv", "svg", "chart"),
    *("config", "file", "compare", "fit", "merge"),
)
_FILE = "file"  # the shell completes paths itself


class Named(click.types.StringParamType):
    """A text for which a shell offers names, and files where no name begins with it."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = _NAMES[str(param.name)]()
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type=_FILE)]


def add_completions(command: click.Command) -> None:
    """Give the parameters of a command that name something the type `Named`."""
    for one in command.params:
        if isinstance(one.type, click.types.StringParamType) and one.name in _NAMES:
            one.type = Named()


def _trees() -> Iterable[str]:
    from treeopt.files.bundled import zoo

    return zoo()


def _prompts() -> Iterable[str]:
    from treeopt.files.bundled import prompt_sets

    return prompt_sets()


def _devices() -> Iterable[str]:
    from treeopt.plan.devices import DEVICES

    return DEVICES


def _models() -> Iterable[str]:
    from treeopt.files.bundled import POCKET

    return (POCKET,)


def _drafts() -> Iterable[str]:
    from treeopt.files.bundled import POCKET_DRAFT

    return (POCKET_DRAFT,)


def _drafters() -> Iterable[str]:
    from treeopt.defaults import HEADS, HEADS_NGRAM, MODEL, MODEL_NGRAM, NGRAM

    return (HEADS, HEADS_NGRAM, NGRAM, MODEL, MODEL_NGRAM)


def _torch_devices() -> Iterable[str]:
    return ("auto", "cpu", "cuda", "cuda:0", "cuda:1", "mps")


def _files() -> Iterable[str]:
    return ()


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "tree": _trees,
    "first": _trees,
    "second": _trees,
    "prompts": _prompts,
    "prompts_learn": _prompts,
    "exclude": _prompts,
    "device_preset": _devices,
    "device": _torch_devices,
    "model": _models,
    "heads": _models,
    "draft": _drafts,
    "drafter": _drafters,
} | dict.fromkeys(_FILES, _files)
