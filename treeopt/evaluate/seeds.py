"""Seeds of baselines that draw: independent draws for each baseline and call, the same in every run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from treeopt.evaluate.baselines import Baseline, Call, Run
from treeopt.models.base import Base


def seeded(base: Base, baseline: Baseline, seed: int, name: str) -> Baseline:
    """The baseline with a seed for each call, which depends on `seed`, its name and the call."""

    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int, call: Call) -> list[Run]:
        sequence = np.random.SeedSequence([seed, *name.encode()], spawn_key=call)
        with _generators_kept(base):
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            return baseline(prompts, max_new_tokens, call)

    return run


@contextlib.contextmanager
def _generators_kept(base: Base) -> Iterator[None]:
    """A context after which torch's generators are as before."""
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
