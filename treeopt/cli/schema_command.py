"""`treeopt schema`: the formats of files as JSON Schema, from the models that read them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import click

from treeopt.cli.configuration import config_schema
from treeopt.cli.console import Console, command

CONFIG = "config"
# Name -> module and class of the model that reads the file, and what it is.
MODELS = {
    "tree": ("treeopt.files.trees", "TreeFile", "a tree, YAML"),
    "policy": ("treeopt.files.policies", "PolicyFile", "per-step trees, YAML"),
    "profile": ("treeopt.files.profiles", "ProfileFile", "seconds per step by nodes, YAML"),
    "prompts": ("treeopt.texts.prompts", "PromptSetFile", "a description of prompts, YAML"),
    "calibration": ("treeopt.files.calibrations", "Header", "traces: the key `treeopt` in a safetensors header"),
    "drafter": ("treeopt.files.drafters", "Header", "a drafter: the key `treeopt` in a safetensors header"),
    "validation": ("treeopt.files.results", "ValidationResult", "what validate --json prints; other keys are ignored"),
    "comparison": ("treeopt.files.results", "ComparisonResult", "what compare --json prints; other keys are ignored"),
    "decoding": ("treeopt.files.results", "DecodingResult", "what generate --json prints; other keys are ignored"),
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@command("schema")
@click.argument("kind", required=False, type=click.Choice([*MODELS, CONFIG]))
@click.pass_context
def run(context: click.Context, console: Console, kind: str | None) -> None:
    """Print the JSON Schema of a kind of file, for editors and other programs; without KIND the list of kinds.

    The schema is made from the model that reads these files, and has the names of keys in files of this version. Rules
    between several values, such as that paths are prefix-closed, are not in it.
    """
    if kind is None:
        kinds = {name: what for name, (_, _, what) in MODELS.items()} | {CONFIG: "options, for --config, YAML"}
        console.table(["kind", "file"], [[name, what] for name, what in kinds.items()])
        console.result({"kinds": kinds})
        return
    schema = config_schema(context.find_root()) if kind == CONFIG else json_schema(kind)
    console.say(json.dumps(schema, indent=2))
    console.result({"kind": kind, "schema": schema})


command = run


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of `MODELS`."""
    module, name, _ = MODELS[kind]
    model: Any = getattr(importlib.import_module(module), name)
    schema: dict[str, Any] = {"$schema": _DIALECT, **model.model_json_schema(by_alias=True)}
    return schema
