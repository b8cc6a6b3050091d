"""`treeopt doctor`: whether treeopt can be used here, and what to do where it cannot.

Each check imports what it needs, and an exception in it is a finding, so that a broken installation is described.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from treeopt.cli.console import Console, command
from treeopt.errors import EXIT_ENVIRONMENT, first_line
from treeopt.version import VERSION

OK, WARN, FAIL = "ok", "warn", "fail"
SHOWN = ("torch", "transformers", "numpy", "numba")  # packages with a line each
HUB_SECONDS = 3.0
LEAST_MEMORY, LITTLE_MEMORY = 1 << 29, 1 << 32  # bytes
LITTLE_DISK = 1 << 30
TOKENS = 16  # that the built-in model decodes


@command("doctor")
@click.pass_context
def run(context: click.Context, console: Console) -> None:
    """Check the installation: versions, device, memory, hub, caches, and a text decoded by the built-in model.

    ok: it works. warn: some commands or options need it. fail: treeopt cannot be used; the exit status is then 4. One
    short request is sent to the hub, and none where HF_HUB_OFFLINE is set.
    """
    checks = list(check_environment())
    console.table(["check", "status", "found"], [[one.name, one.status, one.found] for one in checks])
    for one in checks:
        if one.fix:
            console.say(f"{one.status} {one.name}: {one.fix}")
    failed = [one.name for one in checks if one.status == FAIL]
    console.result({"usable": not failed, "checks": [dataclasses.asdict(one) for one in checks]})
    if failed:
        context.exit(EXIT_ENVIRONMENT)


command = run


@dataclass(frozen=True)
class Check:
    """A finding: what was checked, its status, what was found in a line, and what to do."""

    name: str
    status: str
    found: str
    fix: str = ""


def check_environment(checks: tuple[Callable[[], Iterator[Check]], ...] | None = None) -> Iterator[Check]:
    """The findings of all checks, or of some, in order."""
    for check in CHECKS if checks is None else checks:
        try:
            yield from check()
        except Exception as error:  # whatever is broken
            name = check.__name__.removeprefix("check_")
            fix = "install treeopt again in a new environment: pip install treeopt"
            yield Check(name, FAIL, f"{type(error).__name__}: {first_line(error)}", fix)


def check_versions() -> Iterator[Check]:
    """treeopt, Python, the packages of `SHOWN`, and all requirements."""
    yield Check("treeopt", OK, VERSION)
    yield Check("python", OK, f"{platform.python_version()} ({sys.executable})")
    wrong = list(_unmet())
    for name in SHOWN:
        if name not in dict(wrong):
            yield Check(name, OK, importlib.metadata.version(name))
    if not wrong:
        yield Check("packages", OK, "all that treeopt requires are installed")
    for name, found in wrong:
        yield Check(name, FAIL, found, f"pip install --upgrade '{found.partition('needs ')[2] or name}'")


def _unmet() -> Iterator[tuple[str, str]]:
    """The requirements that are not met, with what was found in place of each."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("treeopt") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield requirement.name, f"not installed; treeopt needs {requirement.name}{requirement.specifier}"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, f"{version}; treeopt needs {requirement.name}{requirement.specifier}"


def check_device() -> Iterator[Check]:
    """The device that `--device auto` takes, and whether torch can use an NVIDIA GPU that is there."""
    import torch

    from treeopt.models.devices import pick_device

    device = pick_device("auto")
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    if device.type != "cpu":
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        memory = f", {free / 1e9:.1f} of {total / 1e9:.1f} GB free" if total else ""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        yield Check("device", OK, f"{name}{memory} ({build})")
        return
    yield Check("device", OK, f"CPU, {platform.machine()} ({build})")
    if shutil.which("nvidia-smi"):
        fix = "install a build of torch for your CUDA: https://pytorch.org/get-started/locally"
        if torch.version.cuda:
            fix = "update the driver, or see the error of: nvidia-smi"
        yield Check("gpu", WARN, f"there is an NVIDIA driver, and torch does not see a GPU ({build})", fix)


def check_threads() -> Iterator[Check]:
    """Threads of torch, and the cores that this process may use."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if threads > cores:
        yield Check("threads", WARN, f"{threads} on {cores} cores: steps are slow", f"export OMP_NUM_THREADS={cores}")
    else:
        yield Check("threads", OK, f"{threads} of torch, {cores} cores")


def check_memory() -> Iterator[Check]:
    """Free memory, less than which no model fits."""
    import psutil

    free = int(psutil.virtual_memory().available)
    found = f"{free / 1e9:.1f} GB free"
    if free < LEAST_MEMORY:
        yield Check("memory", FAIL, found, "end other programs; the built-in model needs 0.5 GB")
    elif free < LITTLE_MEMORY:
        yield Check("memory", WARN, f"{found}: enough for models of 100 million parameters", "end other programs")
    else:
        yield Check("memory", OK, found)


def check_hub() -> Iterator[Check]:
    """Whether the hub answers, in at most `HUB_SECONDS`; nothing is sent in offline mode."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield Check("hub", OK, "offline mode (HF_HUB_OFFLINE): models in the cache and in folders")
    elif _answers(constants.ENDPOINT):
        yield Check("hub", OK, f"{constants.ENDPOINT} answers")
    else:
        found = f"{constants.ENDPOINT} does not answer within {HUB_SECONDS:g} s"
        fix = "use models in folders, or set HTTPS_PROXY or HF_ENDPOINT; HF_HUB_OFFLINE=1 saves the wait"
        yield Check("hub", WARN, found, fix)


def _answers(address: str) -> bool:
    """Whether a request to an address is answered in time; a thread, since resolving its name has no time limit."""
    from huggingface_hub import get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(address, timeout=HUB_SECONDS)
        except Exception:  # the types vary by version of the client
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return answered.is_set()


def check_cache() -> Iterator[Check]:
    """The folder of models from the hub: writable, with space."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    known = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(known).free
    found = f"{folder}, {free / 1e9:.1f} GB free"
    if not os.access(known, os.W_OK):
        yield Check("cache", WARN, f"{folder} cannot be written: no model is downloaded", "export HF_HOME=FOLDER")
    elif free < LITTLE_DISK:
        yield Check("cache", WARN, found, "make room, or export HF_HOME=FOLDER on another disk")
    else:
        yield Check("cache", OK, found)


def check_compiler() -> Iterator[Check]:
    """Whether the machine code of drafting is kept between programs."""
    from treeopt.drafting.kernel.compiled import machine_code_folder

    folder = machine_code_folder()
    if folder is None:
        found = "drafting is compiled at every start, about a minute: no folder can be written"
        yield Check("compiler", WARN, found, "export NUMBA_CACHE_DIR=FOLDER")
    else:
        yield Check("compiler", OK, f"machine code is kept in {folder}")


def check_programs() -> Iterator[Check]:
    """Programs and packages that some options need."""
    path = shutil.which("dot")
    if path is None:
        fix = "install graphviz, such as: apt install graphviz"
        yield Check("dot", WARN, "not installed: render writes .svg and .dot, but no .png or .pdf", fix)
    else:
        yield Check("dot", OK, path)
    try:
        yield Check("peft", OK, importlib.metadata.version("peft"))
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install 'treeopt[train]'"
        yield Check("peft", WARN, "not installed: no train --stage 2, and no --adapter", fix)


def check_decoding() -> Iterator[Check]:
    """Whether a tree of the built-in model's heads gives the text of the model's own greedy decoding."""
    from treeopt.decode.decoder import TreeDecoder
    from treeopt.evaluate.baselines import Call, with_generate
    from treeopt.files.bundled import POCKET
    from treeopt.models.given import load_pair
    from treeopt.texts.encode import encode_prompts
    from treeopt.texts.prompts import load_prompts

    base, loaded = load_pair(POCKET, None, dtype="float32", device="cpu")
    [prompt] = encode_prompts(base, load_prompts(POCKET, limit=1), TOKENS).texts
    [expected] = with_generate(base)([prompt.prompt], TOKENS, Call(0))
    found = TreeDecoder(base, loaded.heads, "mc_sim_7b_63", probe=False).generate(prompt.prompt, TOKENS)
    if found.tokens == list(expected.tokens):
        steps = len(found.step_lengths)
        yield Check("decoding", OK, f"the built-in model: {len(found.tokens)} tokens in {steps} steps, lossless")
    else:
        fix = "install the versions of torch and transformers in constraints.txt, and report it"
        yield Check("decoding", FAIL, "the text of the built-in model with a tree is not that without", fix)


CHECKS = (
    check_versions,
    check_device,
    check_threads,
    check_memory,
    check_hub,
    check_cache,
    check_compiler,
    check_programs,
    check_decoding,
)
