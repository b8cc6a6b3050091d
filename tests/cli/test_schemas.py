"""docs/schemas.json: real files are valid, and broken ones are not, by a validator that knows nothing of treeopt."""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helpers import random_calibration
from looped import looped
from program import treeopt
from report_pages import COMPARISON, DECODING, VALIDATION

from treeopt.calibration import Calibration
from treeopt.drafter import Drafter
from treeopt.files.bundled import prompt_sets, zoo
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.files.schedules import schedule_yaml
from treeopt.files.trees import policy_yaml
from treeopt.policy import TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.tree import Tree

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMAS: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "schemas.json").read_text())


def test_page_is_that_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/schemas.json is what bench/schemas.py writes, and each schema is valid itself."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    assert runpy.run_path(str(ROOT / "bench" / "schemas.py"))["schemas_text"]() == json.dumps(SCHEMAS, indent=1) + "\n"
    for one in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(one)


def faults(kind: str, data: Any) -> list[str]:
    """The faults of a document by the schema of its kind."""
    return [fault.message for fault in jsonschema.Draft202012Validator(SCHEMAS[kind]).iter_errors(data)]


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file of treeopt."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["treeopt"])
    return found


@pytest.fixture
def documents(calibration: Calibration) -> dict[str, Any]:
    """A file of each kind, as written by a command or function, read by another reader."""
    assert calibration.positions
    treeopt("build", "--nodes", "12", "-o", "tree.yaml")
    treeopt("plan", "--model", "llama-7b", "--device-preset", "a100-80gb-pcie", "--nodes", "4", "-o", "profile.yaml")
    save_calibration(random_calibration(1), "c.safetensors")
    drafter = Drafter.untrained(64)
    policy = TreePolicy(16, drafter.depth, drafter.id)
    save_drafter(drafter, "d.safetensors")
    return {
        "tree": yaml.safe_load(Path("tree.yaml").read_text()),
        "policy": yaml.safe_load(policy_yaml(policy)),
        "schedule": yaml.safe_load(
            schedule_yaml(Schedule((ScheduledPlan(1, 8, policy), ScheduledPlan(4, 8, Tree(())))))
        ),
        "profile": yaml.safe_load(Path("profile.yaml").read_text()),
        "prompts": yaml.safe_load(next(iter(prompt_sets().values())).read_text()),
        "calibration": header(Path("c.safetensors")),
        "drafter": header(Path("d.safetensors")),
    }


@looped(("kind", "result"), [("validation", VALIDATION), ("comparison", COMPARISON), ("decoding", DECODING)])
def test_results_are_valid_with_further_keys(kind: str, result: dict[str, Any]) -> None:
    """A result of --json may have keys that are not read; one without its texts, or with another type, is at fault."""
    assert faults(kind, {**result, "further": 1}) == []
    for key in SCHEMAS[kind]["required"]:
        assert faults(kind, {name: value for name, value in result.items() if name != key}), key
        assert faults(kind, {**result, key: {"an": "object"}}), key


def test_files_are_valid_and_broken_ones_are_not(documents: dict[str, Any]) -> None:
    """An unknown key, a missing key and a value of another type are faults in every kind."""
    for kind, document in documents.items():
        assert faults(kind, document) == [], kind
        assert faults(kind, {**document, "nonsense": 1}), kind
        assert faults(kind, {key: value for key, value in document.items() if key != "schema"}), kind
        assert faults(kind, {**document, "schema": "treeopt.tree/2"}), kind


WRONG: list[tuple[str, tuple[Any, ...], Any]] = [
    ("tree", ("paths", 0, "path"), [-1]),
    ("tree", ("paths", 0, "value"), 1.5),
    ("tree", ("nodes",), "12"),
    ("profile", ("points", 0, "seconds"), 0),
    ("profile", ("points", 0, "batch"), 0.5),
    ("policy", ("size_cost",), [[1]]),
    ("schedule", ("plans", 0, "kind"), "other"),
    ("schedule", ("cells", 0, "batch"), 0),
    ("calibration", ("provenance",), {}),
    ("drafter", ("levels", 0, "head"), "large"),
]


def test_wrong_values_are_faults(documents: dict[str, Any]) -> None:
    """The limits of each value are in the schema."""
    validators = {kind: jsonschema.Draft202012Validator(SCHEMAS[kind]) for kind in documents}
    for kind, place, value in WRONG:
        document = copy.deepcopy(documents[kind])
        part = document
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        assert list(validators[kind].iter_errors(document)), (kind, place)


def test_zoo_is_valid() -> None:
    """Every bundled tree follows the schema of trees."""
    validator = jsonschema.Draft202012Validator(SCHEMAS["tree"])
    for path in zoo().values():
        validator.validate(yaml.safe_load(path.read_text()))
