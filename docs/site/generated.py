"""A hook of mkdocs: pages that are made from the code when the site is built, and that are not committed.

    commands.md  every command with its help, options, defaults and examples
    errors.md    every error with its exit status, cause, rule and remedy
    api.md       the committed list of names, each with its signature and docstring

`python docs/site/generated.py` writes the descriptions in docs/api.md again: the first sentences of the docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.app import COMMANDS, GROUPS, program
from treeopt.cli.configuration import COMMON
from treeopt.cli.examples import EXAMPLES
from treeopt.errors import Code

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SITE = Path(__file__).resolve().parent
API = SITE.parent / "api.md"
API_NAME = re.compile(r"^`(treeopt\.[\w.]+)`: (.*?)(\\?)$", flags=re.MULTILINE)  # a backslash breaks the line
ASSETS = ("search-from-file.iframe-worker.js", "site.css")  # files of docs/site that the pages load
_CODE = re.compile(rf"(?<![\w-])(--?[a-z][\w-]*|treeopt (?:{'|'.join(COMMANDS)})\b)")
EXIT_STATUSES = {
    0: "success",
    1: "a bug in treeopt; `--debug` prints the traceback",
    2: "wrong usage of the command line",
    3: "wrong input",
    4: "the environment: hub, device, memory, full disk, missing program, closed standard output",
    5: "not lossless",
    6: "a figure is below its threshold, or a file is not reproduced",
    130: "interrupted; no file is half-written",
    141: "standard output was closed by its reader",
}


# Commands


def commands_page() -> str:
    """The page of all commands, in the groups and the order of `treeopt --help`."""
    top = _context(program, "treeopt", None)
    parts = [
        "# Commands",
        "This page is made from the program's own help: `treeopt COMMAND --help` prints the same. "
        "[Errors](errors.md) explains the exit statuses.",
        "## Options of every command",
        _table(one for one in _options(program.get_command(top, "build"), top) if one[0].name in COMMON),
    ]
    for title, commands in GROUPS.items():
        parts.append(f"## {title}")
        for name in commands:
            parts += _command_parts(program.get_command(top, name), name, top)
    return "\n\n".join(parts) + "\n"


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def _command_parts(command: click.Command | None, name: str, parent: click.Context) -> Iterator[str]:
    """Heading, usage, help, options and examples of a command, and of those below it."""
    assert command is not None
    context = _context(command, name, parent)
    yield f"### {context.command_path}"
    yield f"```sh\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    yield _prose(command.help or "")
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            parts = _command_parts(command.get_command(context, below), below, context)
            yield from (part.replace("### ", "#### ", 1) if part.startswith("### ") else part for part in parts)
        return
    own = [one for one in _options(command, parent) if one[0].name not in COMMON and "--help" not in one[0].opts]
    if own:
        yield _table(own)
    examples = EXAMPLES[context.command_path.removeprefix("treeopt ")]
    yield "```sh\n" + "\n".join(f"# {what}\n{line}" for what, line in examples) + "\n```"


def _options(command: click.Command | None, parent: click.Context) -> list[tuple[click.Option, click.Context]]:
    """The options of a command, each with the command's context."""
    assert command is not None
    context = _context(command, command.name or "", parent)
    return [(one, context) for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]


def _table(options: Any) -> str:
    """A row for each option: its names and value, its default, and what it does."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option, context in options:
        record = option.get_help_record(context)
        assert record is not None
        extra = option.get_help_extra(context)
        told = re.search(r" ?\[default: (.*?)\]", option.help or "")
        meaning = (option.help or "").replace(told[0] if told else "\0", "")
        default = told[1] if told else f"`{extra['default']}`" if "default" in extra else ""
        default = "required" if "required" in extra else default
        bounds = f" Range: `{extra['range']}`." if "range" in extra else ""
        name = record[0].replace(" INTEGER RANGE", " N").replace(" FLOAT RANGE", " X").replace(" INTEGER", " N")
        if isinstance(option.type, click.Choice):
            name = re.sub(r" \[.*\]$", " CHOICE", name)
            bounds += f" One of {', '.join(f'`{choice}`' for choice in option.type.choices)}."
        rows.append(f"| `{_cell(name)}` | {_cell(default)} | {_cell(_coded(meaning) + bounds)} |")
    return "\n".join(rows)


def _prose(text: str) -> str:
    """The paragraphs of a help text; those that click must not wrap (after \\b) are blocks."""
    parts = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        mark, _, rest = paragraph.partition("\n")
        parts.append(f"```text\n{rest}\n```" if mark.strip() == "\b" else _coded(paragraph))
    return "\n\n".join(parts)


def _coded(text: str) -> str:
    """A text in which options and commands, outside of backquotes, are code, and paths of pages are links."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        linked = re.sub(r"docs/([\w/-]+)\.md", r"[\1](\1.md)", parts[i])
        parts[i] = _CODE.sub(r"`\1`", linked).replace("<", "&lt;").replace("*", r"\*")
    return "".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


# Errors


def errors_page() -> str:
    """The page of all errors, in the order of their numbers."""
    rows = [
        f'| <a id="{one.number.lower()}"></a>{one.number} | {one.exit_status} | {_cell(one.cause)} '
        f"| {_cell(_coded(one.rule))} | {_cell(_coded(one.fix))} |"
        for one in sorted(Code, key=lambda code: code.number)
    ]
    return "\n".join(
        [
            "# Errors",
            "",
            "An error is printed on standard error: its number, what is wrong, the place, the rule and a remedy. With",
            "`--json` these parts are one JSON object there. A message may have a more exact rule and remedy than this",
            "page. [Troubleshooting](troubleshooting.md) has frequent problems.",
            "",
            "## Exit statuses",
            "",
            "| status | meaning |",
            "|---|---|",
            *(f"| {status} | {meaning} |" for status, meaning in EXIT_STATUSES.items()),
            "",
            "## Numbers",
            "",
            "| number | status | cause | rule | what to do |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


# API


def summary(name: str) -> str:
    """What a public name does: the first sentence of its docstring, up to a semicolon or a colon."""
    module, _, last = name.rpartition(".")
    described = inspect.getdoc(getattr(importlib.import_module(module), last)) or ""
    sentence = " ".join(described.split("\n\n")[0].split())
    return re.split(r"[.;:] ", sentence)[0].rstrip(".") + "."


def with_summaries(page: str) -> str:
    """docs/api.md with the descriptions of today."""
    return API_NAME.sub(lambda match: f"`{match[1]}`: {summary(match[1])}{match[3]}", page)


# Hooks


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages and what they load."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "errors.md", content=errors_page()))
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(SITE / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Docstrings in place of the list of names; blocks of commands are in the language of the shell."""
    if page.file.src_uri == "api.md":
        return API_NAME.sub(r"\n::: \1\n", markdown)
    opens, lines = True, []
    for line in markdown.split("\n"):
        if line.startswith("```"):
            lines.append("```sh" if opens and line == "```" else line)
            opens = not opens
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    API.write_text(with_summaries(API.read_text()))
