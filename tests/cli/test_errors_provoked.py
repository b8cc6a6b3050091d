"""Every error number is provoked: on the command line as text and as JSON, E510 in Python, where it can occur alone."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT_FOLDER
from fault_runs import make_inputs
from helpers import stretches
from looped import looped
from per_step_traces import traced
from program import error_number, treeopt
from refusals import refusal_of
from safetensors.numpy import save_file
from tiny import chat_base, random_heads, tiny_base

from treeopt.calibrate.results import CalibrationShard, Shard, save_shard
from treeopt.decode.decoder import Step, TreeDecoder
from treeopt.decode.generate import tree_generate
from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import write_files
from treeopt.files.calibrations import SCHEMA, content_of, save_calibration
from treeopt.files.drafters import SCHEMA as DRAFTER_SCHEMA
from treeopt.files.drafters import save_drafter
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.files.trees import save_tree
from treeopt.models.adapters import adapter_files
from treeopt.models.head_files import save_heads
from treeopt.tree import Tree

Patch = pytest.MonkeyPatch
Case = Callable[[Patch], list[str]]
MODEL = ["--model", "base", "--heads", "heads", "--device", "cpu"]
TRACES = ["--calibration", "calibration.safetensors"]
ENGINE_RESULT = '{"avg_spec_accept_length": 2.0}'
SHORT = [*MODEL, "--prompts", "prompts.jsonl", "--max-new-tokens", "4"]
GENERATE = ["generate", "w1 w2", *MODEL, "--tree", "tree.yaml", "--max-new-tokens", "4"]
CALIBRATE = ["calibrate", *SHORT, "-o", "o.safetensors"]
VALIDATE = ["validate", *SHORT, "--tree", "two.yaml", "--repeats", "1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all cases."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture(autouse=True)
def _inputs(inputs: Path) -> None:
    """A copy of the inputs in the folder of the test."""
    shutil.copytree(inputs, ".", dirs_exist_ok=True)


def written(name: str, content: str, *arguments: str) -> Case:
    """A case of a file with this content."""

    def prepare(_patch: Patch) -> list[str]:
        Path(name).write_text(content)
        return list(arguments)

    return prepare


def plain(*arguments: str) -> Case:
    """A case of a command line alone."""
    return lambda _patch: list(arguments)


def small_policy(_patch: Patch) -> list[str]:
    """Per-step trees of one node."""
    save_calibration(traced(1), "steps.safetensors")
    return ["build", "--calibration", "steps.safetensors", "--kind", "dynamic", "--nodes", "1", "-o", "o.yaml"]


def pickle_with_code(_patch: Patch) -> list[str]:
    """Heads in a pickle that names a function."""
    torch.save({"0.0.linear.weight": Path}, "heads.pt")
    return ["heads", "show", "heads.pt"]


def other_tensors(_patch: Patch) -> list[str]:
    """Heads without the tensors of heads."""
    save_file({"a": np.zeros(2, np.float32)}, "heads/medusa_lm_head.safetensors")
    return ["heads", "show", "heads"]


def heads_of_another_size(_patch: Patch) -> list[str]:
    """Heads of a base with another hidden size."""
    save_heads(random_heads(tiny_base("llama", hidden_size=16), 2, shared=True), "small", base="base")
    return ["calibrate", *SHORT, "--heads", "small", "-o", "o.safetensors"]


def two_blocks(_patch: Patch) -> list[str]:
    """Heads that a layout cannot hold."""
    save_heads(random_heads(tiny_base("llama"), 2, blocks=2), "two", base="base")
    return ["heads", "convert", "two", "--for", "nxdi", "-o", "out"]


def another_tokenizer(_patch: Patch) -> list[str]:
    """A draft model with another tokenizer than its base."""
    return ["learn", "--model", "base", "--draft", "pocket", "--prompts", "prompts.jsonl", "--device", "cpu"]


def adapter_of_another_base(_patch: Patch) -> list[str]:
    """An adapter whose note names another base."""
    settings = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}
    base = tiny_base("llama", 1).model
    write_files(adapter_files(Path("adapter"), settings, {"a": torch.zeros(1)}, base=base, heads_id=""))
    return [*CALIBRATE, "--adapter", "adapter"]


def inconsistent_calibration(_patch: Patch) -> list[str]:
    """A calibration whose offsets fall."""
    made = stretches(1, 4)
    arrays, header = content_of(made, "c.safetensors")
    wrong = {**arrays, "offsets": arrays["offsets"][::-1].copy()}
    write_arrays("calibration.safetensors", wrong, {"schema": SCHEMA, **header}, overwrite=True)
    return ["build", "-o", "o.yaml"]


def different_heads(_patch: Patch) -> list[str]:
    """Calibrations of different models."""
    one = stretches(3, 4)
    save_calibration(replace(one, provenance=replace(one.provenance, model_id="b2")), "more.safetensors")
    return ["merge", "calibration.safetensors", "more.safetensors", "-o", "o.safetensors"]


def drafter_without_levels(_patch: Patch) -> list[str]:
    """A drafter file without levels."""
    save_drafter(Drafter.heads_only(2, 7), "d.safetensors")
    arrays, header = read_arrays("d.safetensors", DRAFTER_SCHEMA)
    write_arrays("d.safetensors", arrays, {**header, "levels": []}, overwrite=True)
    return ["generate", "w1", "--model", "base", "--drafter", "d.safetensors", "--device", "cpu"]


def traces_of_another_drafter(_patch: Patch) -> list[str]:
    """A tree and traces of different drafters."""
    save_tree(Tree(((0,),), drafter="0" * 16), "t.yaml")
    return ["show", "t.yaml", "--calibration", "calibration.safetensors"]


def one_shard(_patch: Patch) -> list[str]:
    """One of two shards."""
    save_shard(CalibrationShard(stretches(1, 4), Shard(0, 2), 2, {}, 3), "0.safetensors")
    return ["merge", "0.safetensors", "-o", "o.safetensors"]


def prompt_of_a_wrong_type(_patch: Patch) -> list[str]:
    """A row without text."""
    Path("prompts.jsonl").write_text('{"text": 5}\n')
    return CALIBRATE


def no_prompts(_patch: Patch) -> list[str]:
    """A file of prompts without any."""
    Path("prompts.jsonl").write_text("\n")
    return CALIBRATE


def unknown_architecture(_patch: Patch) -> list[str]:
    """A config of no known architecture."""
    config = Path("base/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "nonsense"}))
    return CALIBRATE


def no_graphviz(patch: Patch) -> list[str]:
    """The `dot` program is not on the path."""
    patch.setenv("PATH", "")
    return ["render", "tree.yaml", "-o", "o.png"]


def full_disk(patch: Patch) -> list[str]:
    """A disk without room."""
    patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, free=0))
    return ["build", "-o", "o.yaml"]


def system_refuses(patch: Patch) -> list[str]:
    """A folder that cannot be listed."""

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "trees")

    patch.setattr("treeopt.cli.list_command.zoo", refuse)
    return ["list"]


def wrong_decoder(patch: Patch) -> list[str]:
    """A decoder whose texts end with another token."""
    start = TreeDecoder.start_all

    def spoiled(self: TreeDecoder, ids: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[dict[int, list[int]]]:
        steps = list(start(self, ids, max_new_tokens))
        if self.tree.nodes > 1:
            for row, step in steps[0].items():
                steps[0][row] = Step([60 - step[0], *step[1:]], step.num_draft_tokens)
        return iter(steps)

    patch.setattr(TreeDecoder, "start_all", spoiled)
    return VALIDATE


def recurrent_model(_patch: Patch) -> list[str]:
    """A model that cannot verify trees."""
    base, tokenizer = tiny_base("mamba"), chat_base().tokenizer
    assert tokenizer is not None
    shutil.rmtree("base")
    base.model.save_pretrained("base")
    tokenizer.save_pretrained("base")
    return GENERATE


def damaged_weights(_patch: Patch) -> list[str]:
    """A weight of the base is NaN."""
    base = chat_base()
    with torch.no_grad():
        base.lm_head.weight[3, 3] = torch.nan
    base.model.save_pretrained("base")
    return GENERATE


def no_other_process(patch: Patch) -> list[str]:
    """One of two processes, and nothing that tells where the other is."""
    patch.setenv("WORLD_SIZE", "2")
    return CALIBRATE


def changed_input(_patch: Patch) -> list[str]:
    """A tree whose calibration is another one now."""
    treeopt("build", *TRACES, "--nodes", "3", "-o", "made.yaml")
    Path("calibration.safetensors").write_bytes(Path("calibration.safetensors").read_bytes() + b" ")
    return ["reproduce", "made.yaml"]


def changed_output(_patch: Patch) -> list[str]:
    """A tree whose file was edited."""
    treeopt("build", *TRACES, "--nodes", "3", "-o", "made.yaml")
    text = Path("made.yaml").read_text()
    Path("made.yaml").write_text(re.sub(r"(path: \[0\], value: )[0-9.]+", r"\g<1>0.25", text))
    return ["reproduce", "made.yaml"]


CASES: dict[Code, Case] = {
    Code.TREE_TOO_DEEP: written("t.txt", str([[0] * n for n in range(1, 6)]), *GENERATE[:-4], "--tree", "t.txt"),
    Code.RANK_TOO_LARGE: written("t.txt", "[[40]]", "show", "t.txt", *TRACES),
    Code.TREE_INVALID: small_policy,
    Code.TREE_UNKNOWN: plain("show", "no_such_tree"),
    Code.TREE_NOT_EXPORTABLE: plain("build", "--nodes", "2049", "--for", "sequoia", "-o", "o.yaml"),
    Code.PATH_UNKNOWN: written("t.txt", "[[0]]", "show", "t.txt", "--path", "0"),
    Code.LABEL_UNKNOWN: plain("render", "mc_sim_7b_63", "--label", "probability", "-o", "o.svg"),
    Code.FILE_MISSING: plain("build", "--calibration", "none.safetensors", "-o", "o.yaml"),
    Code.FILE_EXISTS: plain("compile", "tree.yaml", "-o", "prompts.jsonl"),
    Code.FILE_INVALID: written("t.yaml", "schema: treeopt.tree/1\nnodes: one\npaths: []\n", "show", "t.yaml"),
    Code.FILE_UNWRITABLE: plain("render", "tree.yaml", "-o", "no/such/o.svg"),
    Code.RESUME_INVALID: plain(*CALIBRATE, "--resume"),
    Code.ENGINE_FILE_INVALID: written("t.json", '{"roots": 1}', "import", "t.json", "-o", "o.yaml"),
    Code.INPUT_CHANGED: changed_input,
    Code.PICKLE_REFUSED: pickle_with_code,
    Code.HEADS_INVALID: other_tensors,
    Code.HEADS_MISMATCH: heads_of_another_size,
    Code.HEADS_NOT_EXPORTABLE: two_blocks,
    Code.DRAFT_MISMATCH: another_tokenizer,
    Code.DRAFT_INVALID: plain("learn", "--model", "pocket", "--draft", "mtp", "-o", "o.safetensors"),
    Code.ADAPTER_MISMATCH: adapter_of_another_base,
    Code.CALIBRATION_INVALID: inconsistent_calibration,
    Code.CALIBRATION_MISMATCH: different_heads,
    Code.DRAFTER_INVALID: drafter_without_levels,
    Code.DRAFTER_MISMATCH: traces_of_another_drafter,
    Code.SHARDS_INCOMPLETE: one_shard,
    Code.PROFILE_INVALID: written("m.json", ENGINE_RESULT, "export", "--for", "vllm", *TRACES, "--measured", "m.json"),
    Code.PLAN_INVALID: plain("plan", "--model", "vicuna-7b", "--device-preset", "abacus"),
    Code.HUB_UNREACHABLE: plain(*CALIBRATE, "--heads", "owner/name"),
    Code.PROMPTS_INVALID: prompt_of_a_wrong_type,
    Code.PROMPTS_EMPTY: no_prompts,
    Code.MODEL_INVALID: unknown_architecture,
    Code.PROGRAM_MISSING: no_graphviz,
    Code.OUT_OF_MEMORY: full_disk,
    Code.SYSTEM_REFUSED: system_refuses,
    Code.DEVICE_UNUSABLE: plain(*CALIBRATE, "--device", "cuda:77"),
    Code.PROCESS_ENDED: no_other_process,
    Code.NOT_LOSSLESS: wrong_decoder,
    Code.BELOW_THRESHOLD: plain(*VALIDATE, "--min-tokens-per-step", "99"),
    Code.NOT_REPRODUCED: changed_output,
    Code.NO_TREES: recurrent_model,
    Code.CONTEXT_FULL: plain(*GENERATE, "--tree", "two.yaml", "--max-new-tokens", "100000"),
    Code.NOT_FINITE: damaged_weights,
}
REPORTS = (
    Code.NOT_LOSSLESS,
    Code.BELOW_THRESHOLD,
    Code.INPUT_CHANGED,
    Code.NOT_REPRODUCED,
)  # the report is printed before the error
PYTHON = (Code.GENERATE_UNSUPPORTED, Code.PROCESSES_DIFFER)  # the second one in tests/processes


def test_every_code_is_provoked() -> None:
    """No code is left out, and none is named twice."""
    assert {*CASES, *PYTHON} == {*Code}


@looped("code", CASES)
def test_error_has_its_number_status_and_remedy(code: Code, monkeypatch: Patch) -> None:
    """The error as text and as JSON: one number, its exit status, a rule and a remedy; no output is written."""
    arguments = CASES[code](monkeypatch)
    before = {str(path) for path in Path().rglob("*")}
    said = treeopt(*arguments, status=code.exit_status)
    if code not in REPORTS:
        assert error_number(said) == code.number, said.stderr
    assert said.stderr.count("error[") == 1
    assert f"error[{code.number}]: " in said.stderr
    assert "\n  why: " in said.stderr
    assert "\n  fix: " in said.stderr
    assert "Traceback" not in said.output
    printed = treeopt(*arguments, "--json", status=code.exit_status).stderr.splitlines()
    found = json.loads(printed[-1])
    assert (found["error"], found["exit_status"]) == (code.number, code.exit_status)
    assert found["what"]
    assert found["why"]
    assert found["fix"]
    assert {str(path) for path in Path().rglob("*")} == before


def test_generate_unsupported() -> None:
    """Beam search with `tree_generate`."""
    base = tiny_base("llama")
    heads: Any = {"custom_generate": tree_generate, "heads": random_heads(base, 2), "tree": Tree(((0,),))}
    error = refusal_of(base.model.generate, torch.tensor([[1, 2, 3]]), max_new_tokens=4, num_beams=2, **heads)
    assert error.code is Code.GENERATE_UNSUPPORTED
    assert error.fix
    assert error.as_dict()["error"] == "E510"


def test_registry_is_complete() -> None:
    """Numbers are different, and every code has a documented exit status, a cause, a rule and a remedy."""
    assert len({code.number for code in Code}) == len(Code)
    for code in Code:
        assert code.exit_status in (3, 4, 5, 6)
        assert code.cause.replace(" ", "").islower()
        assert code.rule
        assert code.fix
        made = TreeoptError(code, "it failed")
        assert (made.why, made.fix) == (code.rule, code.fix)


def raises() -> Iterator[tuple[str, ast.Call]]:
    """Every place of the package that makes a TreeoptError."""
    for path in sorted((ROOT_FOLDER / "treeopt").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "TreeoptError(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TreeoptError":
                yield f"{os.path.relpath(path, ROOT_FOLDER)}:{node.lineno}", node


def test_every_error_that_is_raised_has_a_code_and_a_remedy() -> None:
    """Each place names a code of the registry, or hands on that of an error, with its remedy; no remedy is empty."""
    found = list(raises())
    assert len(found) > 200
    used = set()
    for place, call in found:
        code, given = ast.unparse(call.args[0]), {one.arg: one.value for one in call.keywords}
        assert {*given} <= {"at", "why", "fix", None}, place
        fix = given.get("fix")
        assert not (isinstance(fix, ast.Constant) and not fix.value), place
        if code.startswith("Code."):
            used.add(Code[code.removeprefix("Code.")])
        elif not code.endswith("code"):
            continue  # a choice between two codes, in a variable
        else:
            assert fix is not None, f"{place} hands on an error without its remedy"
    assert {*Code} - used <= {Code.NOT_LOSSLESS, Code.PICKLE_REFUSED}
