"""`treeopt reproduce`: run the command that made a file again, and compare but for the clock, the machine and names."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from treeopt.cli.configuration import command_named, option_name, typed_line
from treeopt.cli.console import Console, command, run_inside
from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import (
    DEFAULTS,
    INPUTS,
    KEY,
    MADE_BY,
    NO_COMMANDS,
    command_lines,
    configuration_yaml,
    note_of,
    stored_configuration,
)
from treeopt.files.read import sha256_of

_DRAFTER_SUFFIX = ".drafter.safetensors"  # of a drafter that calibrate learned, named after the calibration
_MOST_THREADS = 1 << 16
_MEANING = {"identical": ": the same bytes", "equal": ": the same values, except for times, the machine and names"}


@command("reproduce")
@click.argument("file")
@click.option("--map", "mapped", multiple=True, metavar="OLD=NEW", help="An input that is elsewhere now; repeatable.")
@click.option("--device", help="cpu, cuda, cuda:1, ...")
@click.option("--device-map", type=click.Choice(["auto"]), help="auto: divide the model among all GPUs.")
def run(console: Console, file: str, mapped: tuple[str, ...], **devices: str | None) -> None:
    """Run the command that made FILE again, from the same inputs, and compare the results.

    FILE is any file that stores its options (`treeopt show FILE --options`); it is never replaced. Names of inputs are
    relative to the folder in which the command was run. An input whose content has changed is refused (E207).

    Exit status 0: the same bytes, or the same values except for times, the machine, and names of files. Exit status 6:
    another result; the first difference is printed.

    Takes as long as the command that made FILE.
    """
    made = _checked(Path(file), mapped)
    [name] = set(made).difference(NO_COMMANDS)
    line = typed_line(command_named(name), made)
    console.say(f"command   {line}")
    known = {str(one.name): option_name(one) for one in command_named(name).params}
    given = [f"--{known[key]}={value}" for key, value in devices.items() if value and key in known]
    with _again(console, Path(file), name, made, given) as again:
        verdict, difference = compare_files(Path(file), again, name)
        machine = _machines(made[MADE_BY], again)
    shown = "different" if difference else verdict
    console.say(f"result    {file} is {shown}{_MEANING.get(verdict, '')}")
    console.result({"file": file, "command": line, "verdict": verdict, "difference": difference, "machine": machine})
    if difference:
        what = f"{file} is not what its command makes now"
        at = difference["place"] + f": {str(difference['old'])[:100]} -> {str(difference['new'])[:100]}"
        fix = f"{line}, with -o AGAIN, to look at what it makes"
        raise TreeoptError(Code.NOT_REPRODUCED, what, at=at, why="; ".join(machine), fix=fix)


def _mapped(value: Any, mapping: Mapping[str, str]) -> Any:
    """The value of an option with the present names of inputs, or of the folders that they are in."""
    if isinstance(value, list):
        return [_mapped(one, mapping) for one in value]
    for old, new in mapping.items():
        if isinstance(value, str) and f"{value}/".startswith(f"{old.rstrip('/')}/"):
            return new.rstrip("/") + value[len(old.rstrip("/")) :]
    return value


def _checked(file: Path, mapped: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The stored configuration with the present names of inputs."""
    mapping = dict(text.split("=", 1) for text in mapped if "=" in text)
    if len(mapping) < len(mapped) or not all([*mapping, *mapping.values()]):
        raise click.BadParameter("OLD=NEW is needed, with two names", param_hint="--map")
    stored = stored_configuration(file)
    if len(set(stored).difference(NO_COMMANDS)) != 1 or MADE_BY not in stored:
        what = f"{file} does not store one command with the hashes of its inputs"
        lines = "; ".join(command_lines(stored))
        raise TreeoptError(Code.FILE_INVALID, what, why="another version wrote it, or Python code", fix=lines)
    if "generate" in stored and stored["generate"].get("memory") is not None:
        what = f"{file} was made with a memory, which has learned its text since"
        raise TreeoptError(Code.FILE_INVALID, what, fix="; ".join(command_lines(stored)))
    if file.suffix == ".svg" and "compare" in stored:
        what = f"{file} is a picture of measured seconds, which are never the same again"
        raise TreeoptError(Code.FILE_INVALID, what, fix="reproduce the result of --json")
    made = {
        name: {key: value if name == MADE_BY else _mapped(value, mapping) for key, value in options.items()}
        for name, options in stored.items()
    }
    made[INPUTS] = {str(_mapped(name, mapping)): hashed for name, hashed in stored.get(INPUTS, {}).items()}
    if mapping and made == {INPUTS: {}, **stored}:
        raise click.BadParameter("no input of the command has this name", param_hint="--map")
    for name, hashed in made[INPUTS].items():
        place = Path(os.path.expanduser(name))
        if not place.is_file():
            fix = "run this in the folder in which the command was run, or give --map OLD=NEW"
            raise TreeoptError(Code.FILE_MISSING, f"an input of {file} is missing", at=name, fix=fix)
        if (found := sha256_of(place)) != hashed:
            at, fix = f"{name}: sha256 {found[:12]}, was {str(hashed)[:12]}", "restore it, or give --map OLD=NEW"
            raise TreeoptError(Code.INPUT_CHANGED, f"an input changed since {file} was made", at=at, fix=fix)
    return made


def _begins_as_json(file: Path) -> bool:
    """Whether a file's first byte is that of an object, which other files with options do not begin with."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(1) == b"{"


@contextlib.contextmanager
def _again(console: Console, file: Path, name: str, made: Mapping[str, Any], devices: list[str]) -> Iterator[Path]:
    """Run the command again; yields what is to be compared, which is deleted at the end.

    Files name their drafter relative to their folder, so the new file lies in the folder of the old one.
    """
    content = content_of(file)
    is_result = (file.suffix == ".json" or _begins_as_json(file)) and not note_of(file).exists()
    folder = Path(tempfile.mkdtemp(prefix=".treeopt-again-", dir=file.resolve().parent))
    try:
        if is_result:
            target = folder / file.name
            outputs = ["--json"]
            outputs += ["-o", str(folder / Path(str(content["output"])).name)] if content.get("output") else []
            if name == "generate":  # the prompt may have come from standard input
                typed = made[name].get("prompt", "-")
                made[name].update(prompt=content.get("prompt") if typed == "-" else typed)
        else:
            outputs, target = _outputs(file, name, content, folder)
        options = folder / "options.yaml"
        options.write_text(configuration_yaml({one: made[one] for one in (name, DEFAULTS) if one in made}))
        threads = made[MADE_BY].get("threads")
        if isinstance(threads, int) and 0 < threads <= _MOST_THREADS:
            import torch

            torch.set_num_threads(threads)  # sums depend on it
        printed = _printed(console, name, ["--config", str(options), *outputs, *devices], keep=is_result)
        if is_result:
            target.write_text(printed)
        yield target
    finally:
        for one in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(one, ignore_errors=True) if one.is_dir() else one.unlink(missing_ok=True)


def _outputs(file: Path, name: str, content: Mapping[str, Any], folder: Path) -> tuple[list[str], Path]:
    """The options of the outputs, and the file or folder among them that is compared."""
    inside = folder / file.name
    if (file / "adapter_config.json").is_file() or (name == "heads convert" and file.is_file()):
        return ["-o", str(folder / "heads")], folder / "heads" / file.name
    if name == "calibrate" and file.name.endswith(_DRAFTER_SUFFIX):
        return ["-o", str(inside.with_name(inside.name.replace(_DRAFTER_SUFFIX, ".safetensors")))], inside
    if name == "plan" and file.suffix == ".svg":
        return ["--chart", str(inside)], inside
    shard = ["--shard", f"{content['shard']}/{content['shards']}"] if content.get("schema") == "treeopt.shard/1" else []
    learned = content.get("provenance.drafter") == f"{file.stem}{_DRAFTER_SUFFIX}"
    target = inside if learned else folder.with_name(f"{folder.name}.{file.name}")
    return [*shard, "--output", str(target)], target


def _printed(console: Console, name: str, words: list[str], *, keep: bool) -> str:
    """The standard output of a command, which is kept where only its status is an error."""
    words = [*words, *(["--quiet"] if console.quiet else []), *(["--no-progress"] if console.no_progress else [])]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run_inside([*name.split(), *words], notes=False)
    except (click.exceptions.Exit, TreeoptError):  # after the result
        if not (keep and printed.getvalue()):
            raise
    return printed.getvalue()


def _machines(before: Mapping[str, Any], again: Path) -> list[str]:
    """What else the new file was made with: versions and threads, which round differently."""
    with contextlib.suppress(TreeoptError):  # a file with a note beside it
        now = stored_configuration(again).get(MADE_BY, {})
        return [f"{one} was {before.get(one)}, is {now[one]}" for one in now if now[one] != before.get(one)]
    return []


# Parts that follow from the clock, in what these commands write; from the machine; and from names of files.
_MEASURE = ("validate", "compare", "generate", "demo", "calibrate", "learn", "profile")
_CLOCK = {"tokens_per_second", "prefill_seconds", "overhead", "speedup", "speedup_vs_autoregressive", "quartiles"}
_CLOCK |= {"seconds", "recommended", "warnings", *(f"{one}_{end}" for one in _CLOCK for end in ("low", "high"))}
_CLOCK |= {"plan", "cost_ratio", "best_drafts", "best_replayed_drafts", "replayed_speedup", "drafting", "low", "high"}
_MACHINE = {"made_by", "versions", "device", "dtype", "threads", "attention"}
_NAMES = {"output", "csv", "chart", "command", "files", "file", "work", "adapter", "drafter", "sha256", KEY}
_COMMENTS = ("<!-- treeopt ", "// treeopt ", "# ")  # configurations and marks
_FASTEST = "fastest size"  # ends the methods of compare that are chosen by seconds


def compare_files(old: Path, new: Path, command: str) -> tuple[str, dict[str, Any] | None]:
    """`identical`, `equal` or `differs`, and the first place with other values, of two files or folders."""
    if _bytes(old) == _bytes(new):
        return "identical", None
    one, other = content_of(old), content_of(new)
    left_out = _MACHINE | _NAMES | (_CLOCK if command in _MEASURE else set())
    for place in dict.fromkeys([*one, *other]):
        if one.get(place) != other.get(place) and not left_out & set(place.split(".")):
            return "differs", {"place": place, "old": one.get(place), "new": other.get(place)}
    return "equal", None


def content_of(path: Path) -> dict[str, Any]:
    """The values of a file, or of the files of a folder, by their place with dots."""
    return _flat({name: _values(path / name, raw) for name, raw in _bytes(path).items()})


def _bytes(path: Path) -> dict[str, bytes]:
    """The files of a folder, or a file alone, by their names in it."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return {"" if one == path else str(one.relative_to(path)): one.read_bytes() for one in files}


def _values(path: Path, raw: bytes) -> Any:
    """The data of a file; of arrays their forms and a hash, and of a text its lines."""
    try:
        if raw[8:9] == b"{":
            end = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:end])
            ours = json.loads(header.pop("__metadata__", {}).get("treeopt", "{}"))
            return {**ours, **header, "arrays": hashlib.sha256(raw[end:]).hexdigest()}
        if path.suffix in (".yaml", ".yml"):
            from treeopt.files import strict_yaml

            return strict_yaml.parse(path, raw).data
        if path.suffix == ".json":
            return json.loads(raw)
        return [line for line in raw.decode().splitlines() if not line.startswith(_COMMENTS)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # another format
        return {"bytes": hashlib.sha256(raw).hexdigest()}


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    """The values of nested data by their place; rows of compare that are chosen by seconds are left out."""
    if isinstance(data, dict) and str(data.get("method", "")).endswith(_FASTEST):
        return {}
    parts = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if parts is None:
        return {place: data}
    return {
        key: part for name, one in parts for key, part in _flat(one, f"{place}.{name}" if place else str(name)).items()
    }
