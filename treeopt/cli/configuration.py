"""`--config FILE`, and the configuration that files and JSON results store: the options of a command by their names.

The values of a file become click's default map, so that a value on the command line comes first.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import DEFAULTS, NO_COMMANDS, command_lines

if TYPE_CHECKING:
    from treeopt.files.strict_yaml import Faults, Where

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
    *("output", "csv", "svg", "chart"),
}
_DEFAULTED = "treeopt.defaulted"  # in a context's meta: parameters with a value under `defaults`
R = TypeVar("R")


def option_name(parameter: click.Parameter) -> str:
    """The name of an option as it is typed, without dashes in front; that of an argument in lower case."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len).lstrip("-")
    return str(parameter.name).replace("_", "-")


def is_given(context: click.Context, name: str) -> bool:
    """Whether a parameter has a value that is not its default, nor under `defaults` in the file of --config."""
    source = context.get_parameter_source(name)
    unchanged = source is ParameterSource.DEFAULT_MAP and name in context.meta.get(_DEFAULTED, ())
    return source is not ParameterSource.DEFAULT and not unchanged


def configuration_of(context: click.Context) -> dict[str, dict[str, Any]]:
    """The options that are given, by the name of the command, and the others, without `NOT_STORED` and empty values.

    Values under `defaults` of a file count as given where they are the defaults of another version.
    """
    given: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for one in context.command.params:
        name, value = str(one.name), context.params.get(str(one.name))
        if name in NOT_STORED or value in (None, (), ""):
            continue
        stated = is_given(context, name)
        if not stated and name in context.meta.get(_DEFAULTED, ()):
            stated = value != (False if _is_unset(one, False) else one.process_value(context, one.default))
        (given if stated and not _is_unset(one, value) else defaults)[option_name(one)] = _stored(value)
    return {command_name(context) or str(context.command.name): given} | ({DEFAULTS: defaults} if defaults else {})


def command_line(context: click.Context) -> str:
    """The command of a context as a line that can be typed again, with `--json`: only such a result is kept.

    The options of the file of --config are in it; `NOT_STORED` and defaults are not.
    """
    return typed_line(context.command, configuration_of(context), "--json")


def typed_line(command: click.Command, configuration: Mapping[str, Mapping[str, Any]], *more: str) -> str:
    """The one command of a configuration as a line that can be typed."""
    arguments = [option_name(one) for one in command.params if isinstance(one, click.Argument)]
    [line] = command_lines(configuration, *more, arguments=arguments)
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


def _is_unset(parameter: click.Parameter, value: Any) -> bool:
    """Whether a flag that cannot be typed as false is false, as it may be by --config."""
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
    for where, parameter, value in _entries(context, functools.reduce(operator.getitem, place, document.data), faults):
        try:
            typed = _typed(parameter, value)
            parameter.process_value(context, typed)
        except (click.UsageError, ValueError) as error:
            faults.append((where, error.message if isinstance(error, click.UsageError) else str(error)))
        else:
            found[str(parameter.name)] = typed
            (defaulted.add if DEFAULTS in where else defaulted.discard)(str(parameter.name))
    if faults:
        raise faults_error(document, "configuration", [((*place, *where), what) for where, what in faults])
    if not found:
        what = f"{path} has no option of treeopt {command_name(context)}"
        fix = "treeopt show FILE --options shows the form"
        raise TreeoptError(Code.FILE_INVALID, what, at=document.at(place), fix=fix)
    context.meta[_DEFAULTED] = defaulted
    context.default_map = found


config_option = click.option(
    "--config", metavar="FILE", is_eager=True, expose_value=False, callback=_read, help="Options from a YAML file."
)


def _entries(
    context: click.Context, data: Mapping[Any, Any], faults: Faults
) -> Iterator[tuple[Where, click.Parameter, Any]]:
    """Place, parameter and value of each option for this command, those of its section last; else a fault."""
    known, name = settable(context.command), command_name(context) or str(context.command.name)
    common = {key: value for key, value in data.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in data.items() if isinstance(value, dict)}
    defaults = {one: sections.pop(one, {}) for one in NO_COMMANDS}[DEFAULTS]
    if name not in sections:
        defaults = {}  # those of another command
    own = sections.pop(name, {})
    others = _commands(context.find_root()) if sections or set(common) - set(known) else {}
    elsewhere = {key for one in others.values() for key in settable(one)}
    for section in sections:
        if section not in others:
            faults.append(((section,), _unknown(section, others, "there is no such command")))
    for where, options, ignored, wrong in (
        ((DEFAULTS,), defaults, {*defaults}, ""),
        ((), common, elsewhere, "no command has this option"),
        ((name,), own, set(), f"treeopt {name} has no such option"),
    ):
        for key, value in options.items():
            if key in known:
                yield (*where, key), known[key], value
            elif key not in ignored:
                faults.append(((*where, key), _unknown(key, known, wrong)))


def settable(command: click.Command) -> dict[str, click.Parameter]:
    """The parameters that a file can set, by the names of their options."""
    return {option_name(one): one for one in command.params if one.name not in (*COMMON, "help")}


def _commands(context: click.Context, group: click.Command | None = None, above: str = "") -> dict[str, click.Command]:
    """Every command of a program, by its name without that of the program."""
    group = context.command if group is None else group
    if not isinstance(group, click.Group):
        return {above.strip(): group}
    found: dict[str, click.Command] = {}
    for name in group.list_commands(context):
        found |= _commands(context, group.get_command(context, name), f"{above}{name} ")
    return found


def command_named(name: str) -> click.Command:
    """The command of a name such as `heads convert`."""
    found = _commands(click.get_current_context().find_root())
    if name not in found:
        raise TreeoptError(Code.FILE_INVALID, f"this version of treeopt has no command {name!r}")
    return found[name]


def _unknown(key: str, known: Iterable[str], what: str) -> str:
    near = difflib.get_close_matches(key, known, n=2)
    return what + (f"; did you mean {' or '.join(near)}?" if near else "")


def _typed(parameter: click.Parameter, value: Any) -> Any:
    """A value of YAML as it would be typed on the command line."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not true or false")
        return value
    if parameter.multiple or parameter.nargs == -1:
        return [_one_typed(parameter, one) for one in (value if isinstance(value, list) else [value])]
    return _one_typed(parameter, value)


def _one_typed(parameter: click.Parameter, value: Any) -> str:
    """One value as it would be typed; a number in quotes is a text, which an option of numbers does not take."""
    if isinstance(value, (list, dict)):
        raise ValueError("takes one value")
    if value is None:
        raise ValueError("has no value: without the key the default is used")
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a value of this option; write a text in quotes")
    if isinstance(value, str) and isinstance(parameter.type(value, parameter), (int, float)):
        raise ValueError(f"{value!r} is a text, and the option takes a number: write it without quotes")
    return str(value)
