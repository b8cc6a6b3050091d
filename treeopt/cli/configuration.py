"""`--config FILE`, and the configuration that files and JSON results store: the options of a command by their names.

The values of a file become click's default map, so that a value on the command line or in the environment comes first.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from treeopt.defaults import DEFAULT_TOP_K
from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import DEFAULTS, NO_COMMANDS, command_lines

if TYPE_CHECKING:
    from treeopt.files.strict_yaml import Document, Where

COMMON = ("config", "json", "quiet", "verbose", "no_progress", "debug")  # parameters that every command has


def command_name(context: click.Context) -> str:
    """The name of a command without that of the program: `build`, `heads show`."""
    names: list[str] = []
    one: click.Context | None = context
    while one is not None and one.parent is not None:
        names.insert(0, one.info_name or "")
        one = one.parent
    return " ".join(names)


# Parameters that are not stored: they do not change what is computed.
NOT_STORED = {
    *COMMON,
    *("help", "force", "resume", "shard", "nproc"),
    *("device", "device_map"),  # differ among shards; files have the kinds of devices in `made_by`
    *("output", "csv", "svg", "chart", "merge"),
}
PREFIX = "TREEOPT_"  # of environment variables
# Variables of tests and the Makefile.
PROJECT_VARIABLES = {f"{PREFIX}{name}" for name in ("SHARED", "CHAT_MODEL", "SITE", "SEEDS")}
# Options in files of 0.1 -> their present names; `top-k` of build and curve was a number of ranks.
RENAMED = {
    **{"batch": "batch-size", "texts": "test-limit", "to": "for", "drafts": "chain-length", "compare": "measured"},
    **{"draft-heads": "num-heads", "draft-levels": "levels", "top-k": "max-rank"},
}
Faults = list[tuple[tuple[str | int, ...], str]]
_DEFAULTED = "treeopt.defaulted"  # in a context's meta: parameters with a value under `defaults`
R = TypeVar("R")


def option_name(parameter: click.Parameter) -> str:
    """The name of an option as it is typed, without dashes in front; that of an argument in lower case."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len).lstrip("-")
    return str(parameter.name).replace("_", "-")


def variable_of(context: click.Context, option: click.Option) -> str:
    """The environment variable of an option of a context's command: `TREEOPT_BUILD_FOR` for `build --for`."""
    return f"{context.auto_envvar_prefix}_{option_name(option).replace('-', '_').upper()}"


def name_variables(context: click.Context) -> None:
    """Give each option the variable of its name, where click would take that of its parameter in Python."""
    for one in context.command.params:
        if (
            isinstance(one, click.Option)
            and one.name != option_name(one).replace("-", "_")
            and one.opts[-1][:2] == "--"
        ):
            one.envvar, one.allow_from_autoenv = variable_of(context, one), False


def unknown_variables(context: click.Context) -> Iterator[str]:
    """A warning for each variable `TREEOPT_*` that is none of ours, nor an option, as far as this command knows."""
    known = {variable_of(context, one): one for one in context.command.params if isinstance(one, click.Option)}
    here = f"{context.auto_envvar_prefix}_"
    program = context.find_root().command
    commands = program.list_commands(context) if isinstance(program, click.Group) else []
    others = tuple(f"{PREFIX}{name.upper()}_" for name in commands)
    for name in sorted(set(os.environ) - PROJECT_VARIABLES - set(known)):
        if name.startswith(PREFIX) and (name.startswith(here) or not name.startswith(others)):
            yield f"warning: the environment variable {_unknown(name, known, f'{name} is no option and has no effect')}"


def is_given(context: click.Context, name: str) -> bool:
    """Whether a parameter has a value that is not its default, nor under `defaults` in the file of --config."""
    source = context.get_parameter_source(name)
    unchanged = source is ParameterSource.DEFAULT_MAP and name in context.meta.get(_DEFAULTED, ())
    return source is not ParameterSource.DEFAULT and not unchanged


def configuration_of(context: click.Context) -> dict[str, dict[str, Any]]:
    """The options that are given, by the name of the command, and the others, without `NOT_STORED` and empty values."""
    given: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for one in context.command.params:
        value = _stored(context.params.get(str(one.name)))
        if one.name not in NOT_STORED and value not in (None, [], ""):
            stated = is_given(context, str(one.name)) and not _is_unset(one, value)
            (given if stated else defaults)[option_name(one)] = value
    stored = {command_name(context) or str(context.command.name): given}
    return stored | ({DEFAULTS: defaults} if defaults else {})


def command_line(context: click.Context) -> str:
    """The command of a context as a line that can be typed again, with `--json`: only such a result is kept.

    The options of the environment and of the file of --config are in it; `NOT_STORED` and defaults are not.
    """
    name, defaults = command_name(context) or str(context.command.name), context.meta.get(_DEFAULTED, ())
    given, arguments = dict(configuration_of(context)[name]), []
    for one in context.command.params:
        key, value = option_name(one), context.params.get(str(one.name))
        if isinstance(one, click.Argument):
            arguments.append(key)
        # Those under `defaults` count as not given, but may be the defaults of another version.
        if one.name in defaults and one.name not in NOT_STORED and value != _default(context, one):
            given[key] = _stored(value)
    [line] = command_lines({name: given}, "--json", arguments=arguments)
    return line


def with_configuration(record: R, configuration: Mapping[str, Any]) -> R:
    """A tree, policy or drafter with a configuration in its source; a profile or calibration in its provenance."""
    name = "provenance" if hasattr(record, "provenance") else "source"
    origin: Any = getattr(record, name)
    if isinstance(origin, Mapping):
        origin = {**origin, "configuration": configuration}
    else:
        origin = dataclasses.replace(origin, configuration=configuration)
    made: R = dataclasses.replace(cast(Any, record), **{name: origin})
    return made


def config_option(function: Any) -> Any:
    """`--config FILE` of every command."""
    return click.option(
        "--config", metavar="FILE", is_eager=True, expose_value=False, callback=_read, help="Options from a YAML file."
    )(function)


def _default(context: click.Context, parameter: click.Parameter) -> Any:
    """The default of a parameter, which click has no value for where it is a flag."""
    return False if _is_unset(parameter, False) else parameter.type_cast_value(context, parameter.default)


def _is_unset(parameter: click.Parameter, value: Any) -> bool:
    """Whether a flag that cannot be typed as false is false, as it may be by the environment and --config."""
    return isinstance(parameter, click.Option) and parameter.is_flag and value is False and not parameter.secondary_opts


def _stored(value: Any) -> Any:
    """A value in types of YAML and JSON."""
    if isinstance(value, (list, tuple)):
        return [_stored(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _read(context: click.Context, _option: click.Parameter, path: str | None) -> None:
    """Make the options in a file the defaults of a command."""
    if path is None:
        return
    if not path:
        raise click.BadParameter("it is empty", context, _option)
    from treeopt.files.configurations import read_configuration
    from treeopt.files.strict_yaml import faults_error

    document, place = read_configuration(path)
    faults: Faults = []
    found: dict[str, Any] = {}
    defaulted: set[str] = set()
    for where, parameter, value in _entries(context, document, place, faults):
        try:
            typed = _typed(parameter, value)
            parameter.process_value(context, typed)
        except (click.UsageError, ValueError) as error:
            faults.append((where, error.message if isinstance(error, click.UsageError) else str(error)))
        else:
            found[str(parameter.name)] = typed
            (defaulted.add if DEFAULTS in where else defaulted.discard)(str(parameter.name))
    if not found and not faults:
        what = f"{path} has no option of treeopt {command_name(context)}"
        raise TreeoptError(
            Code.FILE_INVALID, what, at=document.at(place), fix="treeopt show FILE --options shows the form"
        )
    if faults:
        raise faults_error(document, "configuration", faults)
    context.meta[_DEFAULTED] = defaulted
    context.default_map = found


def _entries(
    context: click.Context, document: Document, place: Where, faults: Faults
) -> Iterator[tuple[Where, click.Parameter, Any]]:
    """Place, parameter and value of each option for this command, those of its section last; else a fault."""
    data = document.data
    for key in place:
        data = data[key]
    known = {option_name(one): one for one in context.command.params if one.name not in (*COMMON, "help")}
    name = command_name(context) or str(context.command.name)
    common = {key: value for key, value in data.items() if not isinstance(value, dict)}
    sections = {key: _present(value, known) for key, value in data.items() if isinstance(value, dict)}
    defaults = {one: sections.pop(one, {}) for one in NO_COMMANDS}[DEFAULTS]
    for key, value in defaults.items():
        if key in known and name in sections:  # else they are those of another command
            yield (*place, DEFAULTS, key), known[key], value
    others = _other_options(context.find_root()) if set(common) - set(known) or set(sections) - {name} else {}
    for key, value in common.items():
        if key in known:
            yield (*place, key), known[key], value
        elif all(key not in options for options in others.values()):
            faults.append(((*place, key), _unknown(key, known, "no command has this option")))
    for section in sections:
        if section not in {name, *others}:
            faults.append(((*place, section), _unknown(section, others, "there is no such command")))
    for key, value in sections.get(name, {}).items():
        if key in known:
            yield (*place, name, key), known[key], value
        else:
            faults.append(((*place, name, key), _unknown(key, known, f"treeopt {name} has no such option")))


def _present(section: Mapping[Any, Any], known: Mapping[str, Any]) -> dict[Any, Any]:
    """A section with the present names of options, where the command has them and not the old ones."""
    found: dict[Any, Any] = {}
    for key, value in section.items():
        new = RENAMED.get(key, key) if key not in known else key
        if new == key or new not in known:
            found[key] = value
        elif key != "top-k":
            found[new] = value
        elif isinstance(value, int) and value != DEFAULT_TOP_K:
            found.setdefault(new, value - 1)
    return found


def _other_options(program: click.Context) -> dict[str, set[str]]:
    """The names of the options of each command that a file can set."""
    return {name: _settable(one) for name, one in _commands(program.command, program)}


def _settable(command: click.Command) -> set[str]:
    return {option_name(one) for one in command.params if one.name not in (*COMMON, "help")}


def _commands(group: click.Command, context: click.Context, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, by its name without that of the program."""
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, context, f"{above}{name} ")
        elif command is not None:
            yield f"{above}{name}", command


def command_named(name: str) -> click.Command:
    """The command of a name such as `heads convert`."""
    context = click.get_current_context().find_root()
    found = dict(_commands(context.command, context))
    if name not in found:
        raise TreeoptError(Code.FILE_INVALID, f"this version of treeopt has no command {name!r}")
    return found[name]


def _unknown(key: str, known: Mapping[str, Any], what: str) -> str:
    near = difflib.get_close_matches(key, known, n=2)
    return what + (f"; did you mean {' or '.join(near)}?" if near else "")


def _typed(parameter: click.Parameter, value: Any) -> Any:
    """A value of YAML as it would be typed on the command line."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not true or false")
        return value
    if _several(parameter):
        return [_one_typed(parameter, one) for one in (value if isinstance(value, list) else [value])]
    return _one_typed(parameter, value)


def _one_typed(parameter: click.Parameter, value: Any) -> str:
    """One value as it would be typed; a number in quotes is a text, which an option of numbers does not take."""
    typed = _scalar(value)
    if isinstance(value, str) and isinstance(parameter.type(typed, parameter), (int, float)):
        raise ValueError(f"{value!r} is a text, and the option takes a number: write it without quotes")
    return typed


def _several(parameter: click.Parameter) -> bool:
    """Whether a parameter takes any number of values."""
    return parameter.multiple or parameter.nargs == -1


def _scalar(value: Any) -> str:
    if isinstance(value, (list, dict)):
        raise ValueError("takes one value")
    if value is None:
        raise ValueError("has no value: without the key the default is used")
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a value of this option; write a text in quotes")
    return str(value)
