"""Every reader of files, with valid files and the damage that fits them: the table of the fuzzer and of its tests.

A reader is called with the path of a damaged file. It may return anything, and raises nothing but TreeoptError.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import hostile_seeds as seeds
import safetensors.torch
from damage import Damage, damage_arrays, damage_bytes, damage_json, damage_tensors, damage_yaml, damage_zip
from tiny import tiny_base

from treeopt.calibrate.results import load_shard, merge_calibrations
from treeopt.cli.configuration import _read as read_options
from treeopt.drafting.memory import load_memory
from treeopt.export.acceptance import read_acceptance
from treeopt.export.lint import lint_tree, read_draft_config
from treeopt.export.trees import import_tree
from treeopt.files.calibrations import load_calibration
from treeopt.files.configurations import configuration_yaml, stored_configuration
from treeopt.files.drafters import load_drafter
from treeopt.files.outputs import written_kind
from treeopt.files.profiles import load_profile
from treeopt.files.results import ComparisonResult, DecodingResult, ValidationResult, load_result
from treeopt.files.schedules import load_plan_for, load_planned
from treeopt.files.strict_yaml import check, load
from treeopt.files.tensors import unedited_schema
from treeopt.files.trees import load_plan, load_tree
from treeopt.models.adapters import CONFIG_FILE, NOTE_FILE, WEIGHTS_FILE, read_adapter
from treeopt.models.base import Base, load_tokenizer
from treeopt.models.checkpoint import check_files
from treeopt.models.config_shapes import config_shape
from treeopt.models.draft_files import load_draft
from treeopt.models.head_files import load_heads
from treeopt.runs.lock import Lock
from treeopt.runs.work import Work, unpack_rows
from treeopt.texts.prompts import PromptSetFile, load_prompts
from treeopt.train.checkpoints import check_same, last_checkpoint
from treeopt.train.data import read_texts
from treeopt.verify.buffers import load_buffers


@dataclass(frozen=True)
class Reader:
    """A reader.

    Args:
        read: called with the path of the damaged file.
        file: its name in the folder.
        valid: makes valid files.
        damage: that of its format.
        enters: names of the functions of treeopt that read it.
        prepare: writes the other files of the folder.
        slow: whether a read takes milliseconds.
        before: called with the path after it was written, and before it is read.
        elsewhere: whether the file may name a file of any folder, which is read too (SECURITY.md).
    """

    read: Callable[[Path], object]
    file: str
    valid: Callable[[], list[bytes]]
    damage: Damage
    enters: tuple[str, ...]
    prepare: Callable[[Path], object] = lambda folder: None
    slow: bool = False
    before: Callable[[Path], object] = lambda path: None
    elsewhere: bool = False


def _prompt_set(path: Path) -> object:
    return check(load(path), PromptSetFile, "treeopt.prompts/1")


def _prompts(path: Path) -> object:
    return load_prompts(path, answers=False)


def _texts(path: Path) -> object:
    return read_texts(str(path)), load_prompts(path, answers=False)


def _options(path: Path) -> object:
    from treeopt.cli.app import program
    from treeopt.cli.build_command import run as command

    context = click.Context(command, info_name="build", parent=click.Context(program, info_name="treeopt"))
    option = next(one for one in command.params if one.name == "config")
    return read_options(context, option, str(path))


def _stored(path: Path) -> object:
    return configuration_yaml(stored_configuration(path))


def _chunk(path: Path) -> object:
    work = Work(path.parent.with_suffix(""), resume=True)
    return unpack_rows(work.chunk("answers-000000", _not_made))


def _not_made() -> Any:
    raise AssertionError("the chunk was made again")


def _begun(path: Path) -> object:
    return Work(path.parent.with_suffix(""), resume=True).begin(json.loads(seeds.begun()[0]))


def _locked(folder: Path) -> None:
    Lock(folder).take()  # it writes a file, which readers do not


def _merged(path: Path) -> object:
    return merge_calibrations([path])


def _output(path: Path) -> object:
    return written_kind(path), unedited_schema(path)


@functools.cache
def _small_base() -> Base:
    return tiny_base("llama", 1, vocab_size=seeds.EAGLE["vocab_size"], hidden_size=seeds.EAGLE["hidden_size"])


def _draft_module(path: Path) -> object:
    return load_draft(str(path.parent), _small_base())


def _heads(path: Path) -> object:
    return load_heads(path.parent)


def _with_weights(folder: Path, name: str = "medusa_lm_head.safetensors") -> None:
    safetensors.torch.save_file(seeds.heads_state(), folder / name)


def _adapter(path: Path) -> object:
    return read_adapter(path.parent)


def _sealed(path: Path) -> None:
    """Write the note of an adapter with the digest of its damaged files, as anybody can."""
    content = path.with_name(WEIGHTS_FILE).read_bytes() + path.with_name(CONFIG_FILE).read_bytes()
    [note] = map(json.loads, seeds.adapter_notes())
    path.with_name(NOTE_FILE).write_text(json.dumps(note | {"sha256": hashlib.sha256(content).hexdigest()}))


def _with_adapter(folder: Path) -> None:
    (folder / CONFIG_FILE).write_bytes(seeds.adapter_configs()[0])
    (folder / NOTE_FILE).write_bytes(seeds.adapter_notes()[0])
    (folder / WEIGHTS_FILE).write_bytes(seeds.adapter_weights()[0])


def _model_files(path: Path) -> object:
    return check_files("model", path.parent)


def _with_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(seeds.model_configs()[0])


def _tokenizer(path: Path) -> object:
    return load_tokenizer("model", str(path.parent), path.parent, local_files_only=True)


def _note(path: Path) -> object:
    return check_same(path.parent, json.loads(seeds.begun()[0]))


def _checkpoint(path: Path) -> object:
    return last_checkpoint(path.parent.parent)


def _with_note(folder: Path) -> None:
    (folder.parent / "begun.json").write_bytes(seeds.begun()[0])
    (folder / "a.bin").touch()


_TREES = "load_tree", "load_plan", "load_document", "read_text"
_RESULTS = "load_result", "parse_json"
READERS: dict[str, Reader] = {
    "tree": Reader(load_tree, "t.yaml", seeds.trees, damage_yaml, _TREES),
    "tree for engines": Reader(lambda path: lint_tree(path, "medusa"), "t.yaml", seeds.trees, damage_yaml, ()),
    "tree of an engine": Reader(import_tree, "t.txt", seeds.engine_trees, damage_json, ("import_tree",)),
    "growmap (.pt)": Reader(import_tree, "t.pt", seeds.growmaps, damage_zip, ("read_growmap_pt",), slow=True),
    "policy": Reader(load_plan, "p.yaml", seeds.policies, damage_yaml, ("load_plan",)),
    "schedule": Reader(load_planned, "s.yaml", seeds.schedules, damage_yaml, ("load_planned",)),
    "plan with its drafter": Reader(
        load_plan_for,
        "p.yaml",
        seeds.policies,
        damage_yaml,
        ("load_plan_for",),
        lambda folder: (folder / "d.safetensors").write_bytes(seeds.drafters()[0]),
        elsewhere=True,
    ),
    "profile": Reader(load_profile, "l.yaml", seeds.profiles, damage_yaml, ("load_profile",)),
    "prompt set": Reader(_prompt_set, "s.yaml", seeds.prompt_sets, damage_yaml, ("load",)),
    "--config": Reader(_options, "c.yaml", seeds.option_files, damage_yaml, ("read_configuration",)),
    "compiled tree": Reader(load_buffers, "b.safetensors", seeds.buffers, damage_arrays, ("load_buffers",)),
    "stored options": Reader(_stored, "c.safetensors", seeds.buffers, damage_arrays, ("stored_configuration",)),
    "calibration": Reader(
        load_calibration,
        "c.safetensors",
        seeds.calibrations,
        damage_arrays,
        ("load_calibration", "read_arrays", "reading"),
    ),
    "shard": Reader(load_shard, "s.safetensors", seeds.shards, damage_arrays, ("load_shard",)),
    "merge": Reader(_merged, "c.safetensors", seeds.whole_parts, damage_arrays, ("merge_calibrations",)),
    "chunk": Reader(
        _chunk,
        "answers-000000.safetensors",
        seeds.chunks,
        damage_arrays,
        (),
        lambda folder: (folder / "begun.json").write_bytes(seeds.begun()[0]),
    ),
    "memory": Reader(load_memory, "m.safetensors", seeds.memories, damage_arrays, ("load_memory",)),
    "drafter": Reader(load_drafter, "d.safetensors", seeds.drafters, damage_arrays, ("load_drafter",)),
    "result of validate": Reader(
        lambda path: load_result(path, ValidationResult), "v.json", seeds.validations, damage_json, _RESULTS
    ),
    "result of compare": Reader(
        lambda path: load_result(path, ComparisonResult), "v.json", seeds.comparisons, damage_json, _RESULTS
    ),
    "result of generate": Reader(
        lambda path: load_result(path, DecodingResult), "v.json", seeds.decodings, damage_json, _RESULTS
    ),
    "acceptance": Reader(read_acceptance, "m.json", seeds.acceptances, damage_json, ("read_acceptance",)),
    "config of a draft": Reader(
        read_draft_config, "config.json", seeds.draft_configs, damage_json, ("read_draft_config",)
    ),
    "prompts .json": Reader(_prompts, "p.json", seeds.prompts_json, damage_json, ("load_prompts", "read_rows")),
    "prompts .jsonl": Reader(_texts, "p.jsonl", seeds.prompts_jsonl, damage_json, ("read_texts",)),
    "prompts .parquet": Reader(_prompts, "p.parquet", seeds.prompts_parquet, damage_bytes, ()),
    "heads": Reader(
        _heads,
        "medusa_lm_head.safetensors",
        seeds.heads,
        damage_tensors,
        ("load_heads",),
        lambda folder: (folder / "config.json").write_bytes(seeds.heads_configs()[1]),
    ),
    "EAGLE head": Reader(
        _draft_module,
        "model.safetensors",
        seeds.eagle_heads,
        damage_tensors,
        ("load_draft",),
        lambda folder: (folder / "config.json").write_bytes(seeds.eagle_configs()[0]),
    ),
    "config of an EAGLE head": Reader(
        _draft_module,
        "config.json",
        seeds.eagle_configs,
        damage_json,
        (),
        lambda folder: (folder / "model.safetensors").write_bytes(seeds.eagle_heads()[0]),
    ),
    "block drafter": Reader(
        _draft_module,
        "model.safetensors",
        seeds.block_drafters,
        damage_tensors,
        (),
        lambda folder: (folder / "config.json").write_bytes(seeds.block_configs()[0]),
    ),
    "config of a block drafter": Reader(
        _draft_module,
        "config.json",
        seeds.block_configs,
        damage_json,
        (),
        lambda folder: (folder / "model.safetensors").write_bytes(seeds.block_drafters()[0]),
    ),
    "heads (.pt)": Reader(_heads, "medusa_lm_head.pt", seeds.heads_pt, damage_zip, ()),
    "config of heads": Reader(_heads, "config.json", seeds.heads_configs, damage_json, ("read_config",), _with_weights),
    "index of shards": Reader(
        _heads,
        "model.safetensors.index.json",
        seeds.indexes,
        damage_json,
        (),
        functools.partial(_with_weights, name="part.safetensors"),
    ),
    "adapter's note": Reader(_adapter, NOTE_FILE, seeds.adapter_notes, damage_json, ("read_adapter",), _with_adapter),
    "adapter's config": Reader(
        _adapter, CONFIG_FILE, seeds.adapter_configs, damage_json, (), _with_adapter, before=_sealed
    ),
    "adapter's weights": Reader(
        _adapter, WEIGHTS_FILE, seeds.adapter_weights, damage_tensors, (), _with_adapter, before=_sealed
    ),
    "generation config": Reader(
        _model_files, "generation_config.json", seeds.generation_configs, damage_json, (), _with_config, slow=True
    ),
    "config of a model": Reader(
        lambda path: config_shape(path, "model"), "config.json", seeds.model_configs, damage_json, (), slow=True
    ),
    "tokenizer": Reader(
        _tokenizer, "tokenizer.json", seeds.tokenizers, damage_json, ("load_tokenizer",), _with_config, slow=True
    ),
    "note of a work folder": Reader(_begun, "begun.json", seeds.begun, damage_json, (), _locked),
    "note of a training": Reader(_note, "begun.json", seeds.begun, damage_json, ()),
    "mark of a checkpoint": Reader(_checkpoint, "whole.json", seeds.marks, damage_json, (), _with_note),
    "existing output": Reader(_output, "o", seeds.outputs, damage_arrays, ()),
}
# Folders of readers that look at the folder's name.
FOLDERS = {"chunk": "out.partial", "note of a work folder": "out.partial", "mark of a checkpoint": "checkpoint-2"}


def folder_of(name: str, place: Path) -> Path:
    """A new folder in `place` with the other files of a reader."""
    folder = place / FOLDERS.get(name, "in")
    folder.mkdir()
    READERS[name].prepare(folder)
    return folder
