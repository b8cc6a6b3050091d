"""The JSON Schemas of treeopt's files, from the models that read them: docs/schemas.json, for editors and programs.

    python bench/schemas.py -o docs/schemas.json

Rules between several values, such as that paths are prefix-closed, are not in a schema.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from timing import add_tiny, machine

from treeopt.drafting import memory
from treeopt.files import calibrations, drafters, profiles, results, schedules, trees
from treeopt.texts import prompts

MODELS: dict[str, Any] = {
    "tree": trees.TreeFile,
    "policy": trees.PolicyFile,
    "schedule": schedules.ScheduleFile,
    "profile": profiles.ProfileFile,
    "prompts": prompts.PromptSetFile,
    "calibration": calibrations.CalibrationHeader,
    "drafter": drafters.DrafterHeader,
    "memory": memory.MemoryHeader,
    "validation": results.ValidationResult,
    "comparison": results.ComparisonResult,
    "decoding": results.DecodingResult,
}
SEALED = ("calibration", "drafter", "memory")  # headers of safetensors files
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    add_tiny(parser)
    given = parser.parse_args()
    print(machine(1))
    given.output.write_text(schemas_text())
    print(f"wrote {given.output}: {', '.join(MODELS)}")


def schemas_text() -> str:
    """The schemas by the kind of file, as JSON."""
    found = {kind: {"$schema": DIALECT, **model.model_json_schema(by_alias=True)} for kind, model in MODELS.items()}
    for kind in SEALED:
        found[kind]["properties"]["sha256"] = {"type": "string", "description": "of the arrays and the other keys"}
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    main()
