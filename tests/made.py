"""Folders that many tests begin with: each is made once in a session, by one of its processes, and copied by tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from program import treeopt

from treeopt.evaluate.profile import TimedStep
from treeopt.files.bundled import pocket
from treeopt.files.profiles import save_profile
from treeopt.latency import LatencyPoint, LatencyProfile

FEW = ("--prompts", "pocket", "--limit", "6", "--max-new-tokens", "16")
OTHERS = ("--prompts", "pocket", "--skip", "6", "--limit", "2", "--max-new-tokens", "16")
MODEL = ("--model", str(pocket()))  # the built-in base, by the name of its folder
LITTLE = ("--learn-tokens", "240", "--nodes", "12", "--nodes", "4", "--levels", "5")


def plant(patch: pytest.MonkeyPatch, static: float, dynamic: float) -> None:
    """Replace the seconds of timed steps: 0.01 of one node, and these of a static tree and of per-step trees."""

    def seconds(step: TimedStep) -> float:
        trees = step.decoder.trees
        return 0.01 if trees.nodes == 1 else dynamic if trees.tree is None else static

    patch.setattr(TimedStep, "seconds", seconds)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[pytest.MonkeyPatch], None]) -> Path:
    """The folder of this name, in which `make` runs where no process of this session has made it before."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"made-{name}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            begun = factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(begun)
                make(patch)
            begun.rename(folder)
    return folder


def _plans(profile: str) -> None:
    """A plan of each kind from `c.safetensors`."""
    build = ("build", "--calibration", "c.safetensors")
    treeopt(*build, "--nodes", "12", "-o", "static.yaml")
    treeopt(*build, "--kind", "dynamic", "--nodes", "12", "-o", "dynamic.yaml")
    treeopt(*build, "--kind", "dynamic", "--nodes", "auto", "--profile", profile, "-o", "auto.yaml")


def make_heads(patch: pytest.MonkeyPatch) -> None:
    """A drafter `heads+ngram` that recommends a policy, traces and trees of every drafter with heads."""
    plant(patch, 9.0, 0.01)
    treeopt("learn", *FEW, *LITTLE, "-o", "d.safetensors")
    treeopt("calibrate", *FEW, "--drafter", "d.safetensors", "-o", "c.safetensors")
    treeopt("calibrate", *FEW, "--kind", "dynamic", "-o", "p.v1.safetensors")
    treeopt("calibrate", *FEW, "-o", "plain.safetensors")
    seconds = {1: 1.0, 2: 1.1, 16: 1.3, 64: 2.6}
    save_profile(LatencyProfile.from_points(LatencyPoint(n, 1, 512, s, s, s) for n, s in seconds.items()), "s.yaml")
    _plans("s.yaml")
    auto = ("--kind", "dynamic", "--nodes", "auto", "--profile", "s.yaml")
    treeopt("build", "--calibration", "p.v1.safetensors", *auto, "-o", "plain-auto.yaml")
    treeopt("build", "--calibration", "plain.safetensors", "--nodes", "8", "-o", "plain.yaml")


def make_ngram(patch: pytest.MonkeyPatch) -> None:
    """A drafter `ngram` of the model alone that recommends a static tree, its traces, profile and plans."""
    plant(patch, 0.01, 9.0)
    treeopt("learn", *MODEL, *FEW, *LITTLE, "-o", "d.safetensors")
    treeopt("calibrate", *MODEL, *OTHERS, "--drafter", "d.safetensors", "-o", "c.safetensors")
    patch.setattr(TimedStep, "seconds", lambda step: 0.01 + 0.0001 * step.decoder.trees.nodes)
    sizes = ("--sizes", "2,8", "--context", "8", "--repeats", "1")
    treeopt("profile", *MODEL, *sizes, "--drafter", "d.safetensors", "--kind", "dynamic", "-o", "p.yaml")
    _plans("p.yaml")
