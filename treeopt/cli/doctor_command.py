"""`treeopt doctor`: whether treeopt can be used here, or whether a drafter is wired as it was trained.

Each check imports what it needs, and an exception in it is a finding, so that a broken installation is described.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import treeopt
from treeopt.cli.checks import check_belongs, check_inputs
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import draft_option, load_draft_model, model_alone
from treeopt.cli.options import chosen_prompts, load_models, model_options, prompt_options, say_prompts
from treeopt.errors import EXIT_BELOW, EXIT_ENVIRONMENT, TreeoptError, first_line
from treeopt.facts import percent
from treeopt.files.atomic import nearest
from treeopt.version import VERSION

OK, WARN, FAIL = "ok", "warn", "fail"
SHOWN = ("torch", "transformers", "numpy", "numba")  # packages with a line each
LEAST_MEMORY, LITTLE_MEMORY = 1 << 29, 1 << 32  # bytes
LITTLE_DISK = 1 << 30
PROMPTS = 20  # whose answers a drafter is checked on
TOKENS = 16  # that the built-in model decodes


@command("doctor")
@model_options(dtype="float32")
@draft_option(default="none")
@prompt_options(limit=str(PROMPTS))
@click.option("--texts/--no-texts", default=True, help="Compare other texts and the other precision, too.")
@click.pass_context
def run(context: click.Context, /, console: Console, **options: Any) -> None:
    """Check the installation: versions, device, memory, hub, caches, and a text decoded by the built-in model.

    ok: it works. warn: some commands or options need it. fail: treeopt cannot be used; the exit status is then 4. One
    short request is sent to the hub, except where HF_HUB_OFFLINE is set.

    With --draft or --heads, check a drafter instead: how often its likeliest token is right on the base's own answers
    (20 prompts, or --limit), beside the same weights with every other wiring that its kind admits. The exit status is 6
    where another wiring fits better, or none fits. A minute for the built-in drafters.
    """
    checked = any(options[name] is not None for name in ("draft", "heads", "model"))
    check_belongs(tuple(options), "--draft or --heads", checked)
    if checked:
        _check_drafter(context, console, options)
        return
    checks = list(check_environment())
    console.table(["check", "status", "found"], [[one.name, one.status, one.found] for one in checks])
    for one in checks:
        if one.fix:
            console.say(f"{one.status} {one.name}: {one.fix}")
    failed = [one.name for one in checks if one.status == FAIL]
    console.result({"usable": not failed, "checks": [dataclasses.asdict(one) for one in checks]})
    if failed:
        context.exit(EXIT_ENVIRONMENT)


def _check_drafter(context: click.Context, console: Console, options: dict[str, Any]) -> None:
    """The wiring of a drafter, and what else lowers its acceptance."""
    if options["draft"] is None and model_alone(options):
        raise click.UsageError("--model alone has no drafter: add --draft or --heads")
    if options["draft"] is not None and options["heads"] is not None:
        raise click.UsageError("--draft and --heads: one drafter is checked at a time")
    source = chosen_prompts(options)
    check_inputs()
    from treeopt.evaluate.diagnosis import diagnose, findings_of_heads
    from treeopt.texts.answers import AnswerOptions
    from treeopt.texts.prompts import skipped_text

    part, given = {"skip": options["skip"], "limit": options["limit"] or PROMPTS}, None
    prompts = treeopt.load_prompts(source, **part)
    with contextlib.suppress(TreeoptError):  # not every row has an answer; others were raised above
        given = treeopt.load_prompts(source, answers=True, **part)
        given = given if any(one.answer for one in given.prompts) else None
    base, loaded = load_models(console, options, with_heads=options["draft"] is None)
    draft = load_draft_model(console, options, base)
    say_prompts(console, prompts)
    drafter: Any = draft if loaded is None else loaded.heads
    answers = AnswerOptions(options["max_new_tokens"], chat_template=options["chat_template"])
    with console.progress("doctor") as progress:
        found = diagnose(base, drafter, prompts, answers, texts=options["texts"], given=given, progress=progress)
    found = dataclasses.replace(found, causes=(*found.causes, *findings_of_heads(loaded)))
    most = max(len(hits) for _, hits, _, _ in found.rows)
    levels = [f"level {level}" for level in range(1, most + 1)]
    cells = ([*map(percent, hits), *[""] * (most - len(hits))] for _, hits, _, _ in found.rows)
    rows = [[row[0], *of_row, f"{row[2]:+.1%}", percent(row[3])] for row, of_row in zip(found.rows, cells, strict=True)]
    console.table(["wiring or texts", *levels, "difference", "standard error"], rows)
    if found.calibration_errors:
        errors = " ".join(map(percent, found.calibration_errors))
        console.say(f"confidence head: expected calibration error {errors}, by level")
    console.report(skipped_text(found.skipped))
    for line in (f"verdict  {found.wiring.verdict}", *(f"also     {cause}" for cause in found.causes)):
        console.say(line)
    console.result(found.as_dict())
    if found.wiring.better or found.wiring.too_weak:
        context.exit(EXIT_BELOW)


@dataclass(frozen=True)
class Check:
    """A finding: what was checked, its status, what was found in a line, and what to do."""

    name: str
    status: str
    found: str
    fix: str = ""


def _found(name: str, found: str, good: bool, fix: str, bad: str = WARN) -> Check:
    return Check(name, OK, found) if good else Check(name, bad, found, fix)


def check_environment(checks: tuple[Callable[[], Iterator[Check]], ...] | None = None) -> Iterator[Check]:
    """The findings of all checks, or of some, in order."""
    for check in CHECKS if checks is None else checks:
        try:
            yield from check()
        except Exception as error:  # whatever is broken
            name = check.__name__.removeprefix("check_")
            fix = "install treeopt again in a new environment: pip install ."
            yield Check(name, FAIL, f"{type(error).__name__}: {first_line(error)}", fix)


def check_versions() -> Iterator[Check]:
    """treeopt, Python, the packages of `SHOWN`, and all requirements."""
    from packaging.requirements import Requirement

    yield Check("treeopt", OK, VERSION)
    yield Check("python", OK, f"{platform.python_version()} ({sys.executable})")
    met = True
    for one in map(Requirement, importlib.metadata.requires("treeopt") or ()):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found = _version(one.name)
        if not found or not one.specifier.contains(found, prereleases=True):
            met, needs = False, f"{one.name}{one.specifier}"
            here = f"{found or 'not installed'}; treeopt needs {needs}"
            yield Check(one.name, FAIL, here, f"pip install --upgrade '{needs}'")
        elif one.name in SHOWN:
            yield Check(one.name, OK, found)
    if met:
        yield Check("packages", OK, "all that treeopt requires are installed")


def _version(name: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_device() -> Iterator[Check]:
    """The device that `--device auto` takes, and whether torch can use an NVIDIA GPU that is there."""
    import torch

    from treeopt.models.devices import pick_device

    device = pick_device("auto")
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    if device.type != "cpu":
        name, memory = device.type, ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            name, memory = torch.cuda.get_device_name(device), f", {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        yield Check("device", OK, f"{name}{memory} ({build})")
        return
    yield Check("device", OK, f"CPU, {platform.machine()} ({build})")
    if shutil.which("nvidia-smi"):
        fix = "install a build of torch for your CUDA: https://pytorch.org/get-started/locally"
        if torch.version.cuda:
            fix = "update the driver, or see the error of: nvidia-smi"
        yield Check("gpu", WARN, f"there is an NVIDIA driver, and torch does not see a GPU ({build})", fix)


def check_threads() -> Iterator[Check]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    yield _found("threads", f"{threads} of torch, {cores} cores", threads <= cores, f"export OMP_NUM_THREADS={cores}")


def check_memory() -> Iterator[Check]:
    import psutil

    free = int(psutil.virtual_memory().available)
    found = f"{free / 1e9:.1f} GB free; the built-in model needs 0.5 GB"
    bad = FAIL if free < LEAST_MEMORY else WARN
    yield _found("memory", found, free >= LITTLE_MEMORY, "end other programs", bad)


def check_hub() -> Iterator[Check]:
    """Whether the hub answers; nothing is sent in offline mode."""
    from huggingface_hub import constants

    from treeopt.models.hub import PROBE_SECONDS, hub_reachable

    if constants.is_offline_mode():
        yield Check("hub", OK, "offline mode (HF_HUB_OFFLINE): models in the cache and in folders")
        return
    fix = "use models in folders, or set HTTPS_PROXY or HF_ENDPOINT; HF_HUB_OFFLINE=1 saves the wait"
    answered = hub_reachable()
    found = "answers" if answered else f"does not answer within {PROBE_SECONDS:g} s"
    yield _found("hub", f"{constants.ENDPOINT} {found}", answered, fix)


def check_cache() -> Iterator[Check]:
    """The folder of models from the hub: writable, with space."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    known = nearest(folder)
    free = shutil.disk_usage(known).free
    if not os.access(known, os.W_OK):
        yield Check("cache", WARN, f"{folder} cannot be written: no model is downloaded", "export HF_HOME=FOLDER")
        return
    fix = "free some space, or export HF_HOME=FOLDER on another disk"
    yield _found("cache", f"{folder}, {free / 1e9:.1f} GB free", free >= LITTLE_DISK, fix)


def check_compiler() -> Iterator[Check]:
    from treeopt.drafting.kernel.compiled import machine_code_folder

    folder = machine_code_folder()
    found = "drafting is compiled at every start, about a minute: no folder can be written"
    found = f"machine code is kept in {folder}" if folder else found
    yield _found("compiler", found, folder is not None, "export NUMBA_CACHE_DIR=FOLDER")


def check_programs() -> Iterator[Check]:
    dot, peft = shutil.which("dot") or "", _version("peft")
    without = "not installed: render writes .svg and .dot, but no .png or .pdf"
    yield _found("dot", dot or without, bool(dot), "install graphviz, such as: apt install graphviz")
    without = "not installed: no train --stage 2, and no --adapter"
    yield _found("peft", peft or without, bool(peft), "pip install peft")


def check_decoding() -> Iterator[Check]:
    """Whether a tree of the built-in model's heads gives the text of the model's own greedy decoding."""
    from treeopt.evaluate.baselines import Call, with_generate
    from treeopt.files.bundled import POCKET
    from treeopt.models.given import load_pair
    from treeopt.texts.encode import encode_prompts

    base, loaded = load_pair(POCKET, None, dtype="float32", device="cpu")
    [prompt] = encode_prompts(base, treeopt.load_prompts(POCKET, limit=1), TOKENS).texts
    [expected] = with_generate(base)([prompt.prompt], TOKENS, Call(0))
    found = treeopt.TreeDecoder(base, loaded.heads, "mc_sim_7b_63", probe=False).generate(prompt.prompt, TOKENS)
    lossless = found.tokens == list(expected.tokens)
    text = f"the built-in model: {len(found.tokens)} tokens in {len(found.step_lengths)} steps"
    text += ", lossless" if lossless else ", and another text with a tree than without"
    fix = "install the versions of torch and transformers in constraints.txt, and report it"
    yield _found("decoding", text, lossless, fix, FAIL)


CHECKS = (
    *(check_versions, check_device, check_threads, check_memory),
    *(check_hub, check_cache, check_compiler, check_programs, check_decoding),
)
