"""Shared by all tests: one thread, no network, the folder of shared data, a small model and a small tree."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what tests expect is that of a CPU; `bench/lossless.py --device` tests GPUs
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub's client
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of programs that tests start, because another worker runs too

import pytest
import torch

from treeopt.drafting import fit
from treeopt.evaluate import learn_drafter as learn_module
from treeopt.evaluate import profile as timed_step
from treeopt.evaluate import runs
from treeopt.models.base import Base, load_base
from treeopt.models.head_files import LoadedHeads, load_heads
from treeopt.tree import Tree

ROOT_FOLDER = Path(__file__).resolve().parent.parent
FIT_STEPS = fit._STEPS
SHARED = Path(os.environ.get("TREEOPT_SHARED", ROOT_FOLDER.parent / "shared")).resolve()


def pytest_configure() -> None:
    torch.set_num_threads(1)  # two threads on two busy cores can be ten times slower than one
    gc.disable()  # while test files import what they test


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the files of all tests, before some are left out by their markers."""
    config.collected_files = {item.path for item in items}  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Leave the half million objects of torch, transformers and the tests themselves out of each collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _little_timing_and_fitting() -> Iterator[None]:
    """Steps are timed once, and weights are searched in a third of the iterations: no test depends on the
    clock or on the last digits of a fit, and timing was a quarter of the commands' tests, fitting an eighth of all.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "_STEPS", 20)
        for name in ("_FEWEST_ROUNDS", "_MOST_ROUNDS"):
            patch.setattr(learn_module, name, 1)
        patch.setattr(timed_step, "_TIMED", 1)
        patch.setattr(runs, "_WARM_UP_TOKENS", 1)
        patch.setattr(runs, "_WARM_UP_TOKENS", 2)
        yield


@pytest.fixture
def whole_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are searched in all iterations, as in the processes that a test starts."""
    monkeypatch.setattr(fit, "_STEPS", FIT_STEPS)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data and models; tests that need it are skipped if it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared data and models ({SHARED} is absent; TREEOPT_SHARED names another place)")
    return SHARED


@pytest.fixture(scope="module")
def base(shared: Path) -> Base:
    """The small pretrained model, loaded once for each test file."""
    return load_base(str(shared / "models" / "tinystories-260k"), device="cpu")


@pytest.fixture(scope="module")
def loaded(shared: Path) -> LoadedHeads:
    """Its five heads."""
    return load_heads(shared / "models" / "tinystories-260k-medusa")


@pytest.fixture
def small_tree() -> Tree:
    """A tree with two candidates of head 1, two of head 2 after the first, and one of head 3."""
    return Tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)), (0.5, 0.2, 0.25, 0.1, 0.125))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Count what `torch.compile` captures, which then runs without generated code; `frame_count` is of graphs."""
    from torch._dynamo.testing import CompileCounter  # takes a second

    counter, compile = CompileCounter(), torch.compile

    def counted(model: Any, **options: Any) -> Any:
        assert "mode" not in options, "a mode of the code generator, which these tests leave out"
        return compile(model, backend=counter, **options)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "c++")
    yield counter
    torch._dynamo.reset()
