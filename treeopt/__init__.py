"""treeopt: measure draft heads, build the best tree for them, and decode with it, losslessly.

    from treeopt import compile_tree, load_tree
    buffers = compile_tree(load_tree("mc_sim_7b_63"))

Importing this package loads neither torch nor transformers; the names below load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from treeopt.version import VERSION

__version__ = VERSION

_HOMES = {
    "Tree": "treeopt.tree",
    "Calibration": "treeopt.calibration",
    "LatencyProfile": "treeopt.latency",
    "Drafter": "treeopt.drafter",
    "TreePolicy": "treeopt.policy",
    "TreeoptError": "treeopt.errors",
    "load_tree": "treeopt.files.trees",
    "save_tree": "treeopt.files.trees",
    "load_calibration": "treeopt.files.calibrations",
    "save_calibration": "treeopt.files.calibrations",
    "load_profile": "treeopt.files.profiles",
    "load_drafter": "treeopt.files.drafters",
    "save_drafter": "treeopt.files.drafters",
    "load_plan": "treeopt.files.policies",
    "save_policy": "treeopt.files.policies",
    "build_policy": "treeopt.optimize.per_step",
    "replay_policy": "treeopt.optimize.per_step",
    "Learning": "treeopt.drafting.learn",
    "build_tree": "treeopt.optimize.tree_builder",
    "replay": "treeopt.optimize.replay",
    "MedusaHeads": "treeopt.models.heads",
    "load_base": "treeopt.models.base",
    "load_heads": "treeopt.models.layouts",
    "save_heads": "treeopt.models.layouts",
    "load_prompts": "treeopt.texts.prompts",
    "run_calibration": "treeopt.calibrate.pipeline",
    "Buffers": "treeopt.verify.buffers",
    "compile_tree": "treeopt.verify.buffers",
    "TreeDecoder": "treeopt.decode.decoder",
    "tree_generate": "treeopt.decode.generate",
    "Greedy": "treeopt.decode.rules",
    "Sample": "treeopt.decode.rules",
    "Typical": "treeopt.decode.rules",
    "measure_profile": "treeopt.evaluate.profile",
    "validate": "treeopt.evaluate.validate",
    "SelfTalk": "treeopt.train.talks",
    "distill": "treeopt.train.distill",
    "Settings": "treeopt.train.settings",
    "train_heads": "treeopt.train.medusa1",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from treeopt.calibrate.pipeline import run_calibration as run_calibration
    from treeopt.calibration import Calibration as Calibration
    from treeopt.decode.decoder import TreeDecoder as TreeDecoder
    from treeopt.decode.generate import tree_generate as tree_generate
    from treeopt.decode.rules import Greedy as Greedy
    from treeopt.decode.rules import Sample as Sample
    from treeopt.decode.rules import Typical as Typical
    from treeopt.drafter import Drafter as Drafter
    from treeopt.drafting.learn import Learning as Learning
    from treeopt.errors import TreeoptError as TreeoptError
    from treeopt.evaluate.profile import measure_profile as measure_profile
    from treeopt.evaluate.validate import validate as validate
    from treeopt.files.calibrations import load_calibration as load_calibration
    from treeopt.files.calibrations import save_calibration as save_calibration
    from treeopt.files.drafters import load_drafter as load_drafter
    from treeopt.files.drafters import save_drafter as save_drafter
    from treeopt.files.policies import load_plan as load_plan
    from treeopt.files.policies import save_policy as save_policy
    from treeopt.files.profiles import load_profile as load_profile
    from treeopt.files.trees import load_tree as load_tree
    from treeopt.files.trees import save_tree as save_tree
    from treeopt.latency import LatencyProfile as LatencyProfile
    from treeopt.models.base import load_base as load_base
    from treeopt.models.heads import MedusaHeads as MedusaHeads
    from treeopt.models.layouts import load_heads as load_heads
    from treeopt.models.layouts import save_heads as save_heads
    from treeopt.optimize.per_step import build_policy as build_policy
    from treeopt.optimize.per_step import replay_policy as replay_policy
    from treeopt.optimize.replay import replay as replay
    from treeopt.optimize.tree_builder import build_tree as build_tree
    from treeopt.policy import TreePolicy as TreePolicy
    from treeopt.texts.prompts import load_prompts as load_prompts
    from treeopt.train.distill import distill as distill
    from treeopt.train.medusa1 import train_heads as train_heads
    from treeopt.train.settings import Settings as Settings
    from treeopt.train.talks import SelfTalk as SelfTalk
    from treeopt.tree import Tree as Tree
    from treeopt.verify.buffers import Buffers as Buffers
    from treeopt.verify.buffers import compile_tree as compile_tree


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'treeopt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
