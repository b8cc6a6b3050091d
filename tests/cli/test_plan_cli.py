"""`treeopt plan` as a user meets it: tables, JSON, profiles, charts, fits, what each drafter pays, and wrong input."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import random_calibration
from looped import looped
from per_step_traces import traced
from program import error_of, treeopt

from treeopt.calibration import Calibration
from treeopt.drafter import Drafter, Level
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.files.profiles import load_profile, save_profile
from treeopt.models.config_shapes import heads_drafting
from treeopt.models.shapes import model_shape
from treeopt.plan.devices import device_of_spec
from treeopt.plan.operators import StepSetting
from treeopt.plan.step_model import Efficiency, StepModel

A100 = ("--device-preset", "a100-80gb-pcie")
LLAMA = ("plan", "--model", "llama-7b", *A100)
SPEC = "flops=1e11,bandwidth=2e10"


def as_json(*arguments: str) -> Any:
    """The one object of --json."""
    return json.loads(treeopt(*arguments, "--json").stdout)


def test_json_has_the_points_and_the_best_size() -> None:
    """One point a size, batch and context, with six figures; sizes rise to 64 or 128 and fall."""
    found = as_json(*LLAMA, "--batch-size", "1", "--context", "1024", "--nodes", "1,2,4,8,16,32,64,128,256,512")
    assert [point["nodes"] for point in found["points"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    for point in found["points"]:
        assert set(point) == {"nodes", "batch", "context", "seconds", "overhead", "speedup"}
        assert (point["batch"], point["context"]) == (1, 1024)
    assert found["points"][0]["overhead"] == found["points"][0]["speedup"] == 1.0
    assert found["points"][0]["seconds"] == pytest.approx(0.007112, rel=1e-3)
    assert found["best_nodes"] in (64, 128)
    assert found["best"][0]["any_nodes"] == 169
    assert found["device"]["source"] == "NVIDIA A100 Tensor Core GPU datasheet"
    assert found["model"]["parameters"] == 6_738_415_616


def test_table_marks_the_best_size() -> None:
    """A line a size, and the fastest is marked."""
    lines = treeopt(*LLAMA, "--nodes", "16,64").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines[:4]] == ["nodes", "1", "16", "64 best"]


def test_profile_is_taken_by_build_and_curve(calibration: Calibration) -> None:
    """`build --nodes auto` and `curve` price trees with the modelled profile of the calibration's drafter."""
    options = ("--calibration", "calibration.safetensors", "--nodes", "1,2,4,8,16", "-o", "p.yaml")
    found = as_json(*LLAMA, *options)
    profile = load_profile("p.yaml")
    assert profile.provenance["modelled"].startswith("treeopt plan; efficiency: compute 1")
    assert (profile.provenance["model"], profile.provenance["device"]) == ("llama-7b", "a100-80gb-pcie")
    assert (profile.provenance["dtype"], profile.kind) == ("bfloat16", "static")
    assert profile.provenance["heads_id"] == calibration.provenance.heads_id
    curve = as_json("curve", "--profile", "p.yaml", "--largest", "16")
    by_nodes = {point["nodes"]: point for point in curve["points"]}
    for point in found["points"]:
        assert point["overhead"] == pytest.approx(by_nodes[point["nodes"]]["overhead"])
        assert point["speedup"] == pytest.approx(by_nodes[point["nodes"]]["speedup"])
    tree = as_json("build", "--nodes", "auto", "--profile", "p.yaml", "-o", "t.yaml")
    assert tree["nodes"] == found["best"][0]["any_nodes"]
    error = treeopt(*LLAMA, *options, status=3).stderr
    assert "E202" in error
    treeopt(*LLAMA, *options, "--force")


def test_few_texts_are_warned_of() -> None:
    """Four texts cannot be cross-validated, and the warning says what the figures are of."""
    save_calibration(random_calibration(1, sequences=4), "few.safetensors")
    options = ("--calibration", "few.safetensors", "--nodes", "1,8")
    [warning] = as_json(*LLAMA, *options)["warnings"]
    assert warning == "4 texts, too few for cross-validation; tokens per step are those of the fitted texts"


@pytest.mark.slow
def test_fit_prints_the_errors_of_steps_left_out() -> None:
    """A profile of pocket calibrates the device; a modelled profile does not."""
    shape = model_shape("pocket")
    setting = StepSetting("float32", attention="flash")
    model = StepModel(shape, device_of_spec(SPEC), setting, heads_drafting("pocket", shape), Efficiency(0.5, 0.1, 1e-5))
    known = {"model": "pocket", "heads": "pocket", "dtype": "float32", "attention": "sdpa", "drafter_name": "heads"}
    save_profile(model.profile([4, 16, 64, 256], [1, 4], [64, 256], known), "measured.yaml")
    options = ("--device-spec", SPEC, "--dtype", "float32", "--fit", "measured.yaml")
    found = as_json("plan", "--model", "qwen2.5-0.5b", *options)
    assert found["efficiency"]["compute"] == pytest.approx(0.5, rel=0.05)
    assert found["efficiency"]["bandwidth"] == pytest.approx(0.1, rel=0.05)
    assert set(found["fit"]) == {"none", "nodes", "batch and context"}
    assert found["fit"]["nodes"]["median"] < 0.05
    text = treeopt("plan", "--model", "pocket", *options, "-o", "modelled.yaml").stdout
    assert "error of steps left out by nodes: median" in text
    assert "steps of one model do not separate" in text
    assert "compute 0.5" in load_profile("modelled.yaml").provenance["modelled"]
    error = treeopt("plan", "--model", "pocket", "--device-spec", SPEC, "--fit", "modelled.yaml", status=3).stderr
    assert "modelled.yaml was modelled" in error
    error = treeopt("plan", "--model", "pocket", *options, "-o", "measured.yaml", "--force", status=3).stderr
    assert "is an input" in error


def test_profile_that_cannot_be_fitted_is_refused() -> None:
    """E240: forwards of a draft model and other dtypes would go into the efficiency."""
    model = StepModel(model_shape("pocket"), device_of_spec(SPEC), StepSetting("float32", attention="flash"))
    known = {"model": "pocket", "heads": "", "dtype": "float32", "attention": "sdpa", "drafter_name": "ngram"}
    profile = model.profile([4, 16, 64], [1, 4], [64], known)
    options = ("plan", "--model", "pocket", "--device-spec", SPEC, "--dtype", "float32", "--fit", "p.yaml")
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"drafter_name": "model"}, "is of a draft model"),
        ({"drafter_name": "model+ngram"}, "is of a draft model"),
        ({"unit": "path tokens"}, "is by path tokens"),
        ({"dtype": "float64"}, "float64"),
        ({"dtype": None}, "no dtype"),
    )
    for changed, says in changes:
        source = {key: value for key, value in (known | changed).items() if value is not None}
        save_profile(dataclasses.replace(profile, provenance=source), "p.yaml")
        error = treeopt(*options, status=3).stderr
        assert "E240" in error
        assert "p.yaml" in error
        assert says in error


def test_chart_is_replaced_while_it_is_unedited() -> None:
    """The picture has every point in its description."""
    treeopt(*LLAMA, "--nodes", "1,64", "--batch-size", "1,8", "--chart", "a.svg")
    text = Path("a.svg").read_text()
    assert "speedup over autoregressive, batch 8: 1 at 1, 1.064 at 64" in text
    assert "overhead: one node = 1, batch 8: 1 at 1, 2.804 at 64" in text
    drawn = " ".join(re.findall(r">([^<>]+)</text>", text))
    assumed = ("batch 1, 8; 1024 tokens in the cache", "FLOP/s", "1 + 0.477 ln(nodes)", "bfloat16", "drafting:")
    for words in ("modelled, not measured", *assumed):
        assert words in drawn, words
    treeopt(*LLAMA, "--chart", "a.svg")
    assert Path("a.svg").read_text() != text
    Path("a.svg").write_text(text.replace("llama", "lama", 1))
    assert "E202" in treeopt(*LLAMA, "--chart", "a.svg", status=3).stderr


def test_warnings_of_memory_and_context() -> None:
    """A cache that does not fit, and a context that the model does not have, are named."""
    found = as_json(*LLAMA, "--batch-size", "64", "--context", "4096", "--nodes", "1")
    assert len(found["warnings"]) == 2
    assert "exceed the 80 GB" in found["warnings"][0]
    assert "takes 2048 tokens" in found["warnings"][1]
    assert "warnings" not in as_json(*LLAMA, "--nodes", "1")


def test_presets_are_listed() -> None:
    """Every model and device with its source."""
    text = treeopt("plan", "--presets").stdout
    assert "llama-7b\t6,738,415,616\t2048\thuggyllama/llama-7b" in text
    assert "a100-80gb-pcie\tbfloat16 312 float32 19.5\t1935\t80\tNVIDIA A100 Tensor Core GPU datasheet" in text
    known = as_json("plan", "--presets")
    assert len(known["models"]) > 25
    assert all(device["source"] for device in known["devices"])


@looped(
    ("line", "status", "says"),
    [
        (["plan"], 2, "--model"),
        (["plan", "--model", "llama-7b"], 2, "--device-preset"),
        ([*LLAMA, "--device-spec", SPEC], 2, "--device-spec"),
        (["plan", "--model", "lama-7b", *A100], 3, "llama-7b"),
        (["plan", "--model", "./nowhere", *A100], 3, "E201"),
        (["plan", "--model", "llama-7b", "--device-preset", "a10"], 3, "a100-80gb-pcie"),
        (["plan", "--model", "llama-7b", "--device-spec", "flops=1"], 3, "bandwidth"),
        (["plan", "--model", "llama-7b", "--device-spec", "flops=nan,bandwidth=1"], 3, "flops"),
        ([*LLAMA, "--dtype", "float8"], 3, "float8"),
        ([*LLAMA, "--dtype", "int3"], 2, "int3"),
        ([*LLAMA, "--nodes", "0"], 2, "--nodes"),
        ([*LLAMA, "--nodes", "-4"], 2, "--nodes"),
        ([*LLAMA, "--nodes", "1.5"], 2, "--nodes"),
        ([*LLAMA, "--nodes", "nan"], 2, "--nodes"),
        ([*LLAMA, "--nodes", "999999999999"], 3, "E240"),
        ([*LLAMA, "--batch-size", "999999999999999"], 3, "E240"),
        ([*LLAMA, "--context", "999999999999999"], 3, "E240"),
        ([*LLAMA, "--host-seconds", "nan"], 2, "--host-seconds"),
        ([*LLAMA, "--host-seconds", "-1"], 2, "--host-seconds"),
        ([*LLAMA, "--draft", "llama-68m"], 2, "--levels"),
        ([*LLAMA, "--shared-lm-head"], 2, "--num-heads"),
        ([*LLAMA, "--fit", "p.yaml"], 3, "E201"),
        ([*LLAMA, "--fit", "p.yaml", "--fit", "./p.yaml"], 2, "--fit ./p.yaml is given twice"),
        (["plan", "--presets", "--nodes", "7"], 2, "give either --presets or --nodes"),
        ([*LLAMA, "--host-seconds", "1e308"], 3, "from 0 to 86400"),
        ([*LLAMA, "--calibration", "c.safetensors"], 3, "E201"),
        ([*LLAMA, "-o", "plan.svg"], 3, "E204"),
        ([*LLAMA, "--chart", "plan.yaml"], 3, "E204"),
        ([*LLAMA, "--chart", "."], 3, "E204"),
        ([*LLAMA, "--kind", "dynamic", "--calibration", "calibration.safetensors"], 3, "E220"),
    ],
)
@pytest.mark.usefixtures("calibration")
def test_wrong_input_is_one_clear_error(line: list[str], status: int, says: str) -> None:
    """Usage errors exit with 2, wrong input with 3, and none prints a traceback."""
    error = treeopt(*line, status=status).stderr
    assert says in error
    assert "Traceback" not in error
    assert "bug" not in error


NGRAM = Drafter.untrained(50, 8)
HEADS_NGRAM = dataclasses.replace(Drafter.untrained(50, 12), num_heads=2, lm_head_levels=0)
MODEL = dataclasses.replace(Drafter.model_only(6, 4, "m1"), source={"draft": "llama-68m"})
DRAFT = ("--draft", "llama-68m", "--levels", "4")
HEADS = ("--calibration", "calibration.safetensors")


def save(calibration: Calibration, name: str, drafter: Drafter, heads_id: str = "", *, file: bool = True) -> list[str]:
    """The traces of three levels as those of a drafter; the options that name them."""
    path = f"{name}.drafter.safetensors"
    if file:
        save_drafter(drafter, path)
    known = {"heads": heads_id, "heads_id": heads_id, "drafter_id": drafter.id, "drafter": path}
    provenance = dataclasses.replace(calibration.provenance, **known)
    save_calibration(dataclasses.replace(calibration, provenance=provenance), f"{name}.safetensors")
    return ["--calibration", f"{name}.safetensors"]


@looped(
    ("drafter", "heads_id", "options", "alone", "text"),
    [
        (None, "", (), ("--num-heads", "3"), "3 heads with LM heads of their own"),
        (None, "", ("--num-heads", "3", "--shared-lm-head"), (), "3 heads with the base's LM head"),
        (NGRAM, "", (), (), "none"),
        (HEADS_NGRAM, "h1", (), ("--num-heads", "2"), "2 heads with LM heads of their own"),
        (MODEL, "", DRAFT, (), "draft model llama-68m, 4 levels"),
    ],
)
def test_a_drafter_pays_for_its_own(
    drafter: Drafter | None, heads_id: str, options: Any, alone: Any, text: str, calibration: Calibration
) -> None:
    """A draft model and the host by the options, heads by the calibration where the options name none.

    The expected seconds are those of a plan of this drafting without a calibration.
    """
    named = list(HEADS) if drafter is None else save(calibration, "own", drafter, heads_id)
    line = (*LLAMA, "--nodes", "8", "--host-seconds", "0.001", *options)
    found = as_json(*line, *named, "-o", "p.yaml", "--force")
    assert found["points"][1]["seconds"] == pytest.approx(as_json(*line, *alone)["points"][1]["seconds"])
    assert found["drafting"] == f"{text}, 0.001 host seconds"
    assert "warnings" not in found
    assert load_profile("p.yaml").drafter == ("" if drafter is None else drafter.id)


def test_work_on_the_host_is_not_forgotten(calibration: Calibration) -> None:
    """An n-gram table drafts on the host; heads alone do not."""
    line = (*LLAMA, "--nodes", "8")
    [warning] = as_json(*line, *save(calibration, "own", NGRAM))["warnings"]
    assert "--host-seconds counts it" in warning
    assert "warnings" not in as_json(*line, "--num-heads", "3", *HEADS)


def test_draft_model_without_draft_is_refused(calibration: Calibration) -> None:
    """The error names the drafter's own draft model and its levels as the remedy."""
    named = save(calibration, "model", MODEL)
    assert "--draft llama-68m --levels 6" in error_of("E240", *LLAMA, "--nodes", "8", *named)


def test_drafter_that_is_not_found_is_warned_of(calibration: Calibration) -> None:
    """Without its file a drafter's kind is unknown; its levels are taken as heads where it has some."""
    for name, drafter, heads_id, text in (("both", HEADS_NGRAM, "h1", "3 heads"), ("ngram", NGRAM, "", "none")):
        options = [*LLAMA, "--nodes", "8", *save(calibration, name, drafter, heads_id, file=False)]
        found = as_json(*options)
        assert f"{name}.drafter.safetensors, is not found" in found["warnings"][0]
        assert found["drafting"].startswith(text)
    save_drafter(MODEL, "ngram.drafter.safetensors")  # another drafter at the path of the calibration
    assert "is not found" in as_json(*options)["warnings"][0]


@pytest.mark.usefixtures("calibration")
def test_other_number_of_heads_is_refused() -> None:
    """The calibration of heads says how many there are."""
    error = error_of("E240", *LLAMA, "--nodes", "8", *HEADS, "--num-heads", "2", "-o", "p.yaml")
    assert "3 heads, and the options name 2" in error
    assert not Path("p.yaml").exists()


def test_per_step_trees_pay_the_host() -> None:
    """Per-step trees by heads alone with a drafter's estimates: the seconds that are given."""
    drafter = Drafter((Level(),) * 2, 2, 4)
    assert drafter.name == "heads"
    save_drafter(drafter, "d.safetensors")
    save_calibration(traced(1, exact=True, drafter=drafter.id), "steps.safetensors")
    options = (*LLAMA, "--nodes", "8", "--calibration", "steps.safetensors", "--kind", "dynamic")
    text = as_json(*options, "--host-seconds", "0.001")["drafting"]
    assert text == "2 heads with LM heads of their own, 0.001 host seconds"


@looped(
    ("options", "text", "free"),
    [
        ((), "none, 0 host seconds", True),
        (("--num-heads", "5"), "5 heads with LM heads of their own, 0 host seconds", False),
        (("--num-heads", "5", "--shared-lm-head"), "5 heads with the base's LM head, 0 host seconds", False),
        (DRAFT, "draft model llama-68m, 4 levels, 0 host seconds", False),
    ],
)
def test_what_drafts_is_printed_and_in_the_profile(options: tuple[str, ...], text: str, free: bool) -> None:
    """The assumption is in the table's lines, in JSON, and in the provenance; free drafting is a warning too."""
    result = treeopt(*LLAMA, "--nodes", "8", *options, "-o", "p.yaml")
    assert f"drafting: {text}" in result.stdout.splitlines()
    assert load_profile("p.yaml").provenance["modelled"].endswith(f"; drafting: {text}")
    found = as_json(*LLAMA, "--nodes", "8", *options)
    assert found["drafting"] == text
    assert ["drafting is taken as 0 seconds" in line for line in found.get("warnings", [])] == [True] * free
    assert ("drafting is taken as 0 seconds" in result.stderr) == free
