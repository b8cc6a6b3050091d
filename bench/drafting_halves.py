"""A model with prompts in two halves, and calibrations of either half: what the benches of drafting share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.models.base import Base, load_base
from treeopt.models.given import load_pair
from treeopt.models.head_files import LoadedHeads
from treeopt.texts.prompts import PromptSet, load_prompts

TOP_K = 32
FEW = 48  # prompts of a half, of SmolLM2
TRAINED_ON = 600  # AlpacaEval prompts that drafters of SmolLM2 were trained on, the first ones
# Of heads+ngram: tokens per step over those of the Medusa tree, at each of SIZES.


@dataclass(frozen=True)
class Pair:
    """A model, with heads where it has some, and its prompts in two halves."""

    base: Base
    loaded: Any  # LoadedHeads; None for the hybrid
    first_half: PromptSet
    second_half: PromptSet
    new_tokens: int


def load(name: str, shared: Path, *, tiny: bool) -> Pair:
    """tinystories with its heads and the story openings, SmolLM2 with its heads and the AlpacaEval prompts that neither
    these nor its EAGLE-3 head were trained on, the hybrid with pocket's prompts, or pocket with its heads and prompts.
    """
    loaded: LoadedHeads | None
    if name == "smollm2":
        base, loaded = load_pair("tests/data/smollm2-heads", "build/smollm2", dtype="bfloat16", device="cpu")
        prompts, tokens = load_prompts(str(shared / "data" / "alpaca_eval.json"), skip=TRAINED_ON), 128
    elif name == "tinystories":
        folder = shared / "models"
        base, loaded = load_pair(
            str(folder / "tinystories-260k-medusa"), str(folder / "tinystories-260k"), dtype="float32", device="cpu"
        )
        prompts, tokens = load_prompts(str(shared / "data" / "story_openings.json")), 160
    elif name == "hybrid":
        base, loaded = load_base("tests/data/hybrid", dtype="float32", device="cpu"), None
        prompts, tokens = load_prompts("pocket"), 128
    else:
        base, loaded = load_pair("pocket", None, dtype="float32", device="cpu")
        prompts, tokens = load_prompts("pocket"), 128
    half = len(prompts.prompts) // 2
    count = 6 if tiny else min(half, FEW) if name == "smollm2" else half
    parts = (prompts.prompts[:count], prompts.prompts[half : half + count])
    first_half, second_half = (dataclasses.replace(prompts, prompts=part) for part in parts)
    return Pair(base, loaded, first_half, second_half, 12 if tiny else tokens)


def traces(
    pair: Pair,
    *,
    evaluated: bool,
    drafter: Drafter | None = None,
    learning: Learning | None = None,
    heads: bool = True,
    draft: Base | None = None,
) -> CalibrationRun:
    """A calibration of one half, with per-step trees where there is a drafter; by heads, a draft or neither."""
    return run_calibration(
        pair.base,
        pair.loaded if heads and draft is None else None,
        pair.second_half if evaluated else pair.first_half,
        max_new_tokens=pair.new_tokens,
        batch_size=64,
        drafter=drafter,
        learning=learning,
        steps=drafter is not None or learning is not None,
        draft=draft,
    )


def others(known: Calibration, evaluated: Calibration) -> list[int]:
    """The texts of one calibration that are not in another."""
    hashes = set(known.token_hashes)
    return [text for text in range(evaluated.sequences) if evaluated.token_hashes[text] not in hashes]
