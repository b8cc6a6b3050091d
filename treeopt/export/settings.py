"""Settings of engines that take no fixed tree: the length of a chain, or the numbers of a dynamic tree, by replay.

Tokens per step come from replay of what the engine will draft (`treeopt.optimize.engine_replay`), seconds from a
latency profile. A setting that follows from neither is named with the reason, and not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeopt.calibration import Calibration
from treeopt.engines import SETTINGS
from treeopt.errors import Code, TreeoptError, check_choice, check_counts
from treeopt.export.settings_of import Found, Given, settings_of
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget
from treeopt.optimize.engine_choice import chain_tokens
from treeopt.optimize.engine_replay import replay_chain
from treeopt.optimize.replay import Replay


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine with the steps that replay promises.

    Args:
        engine: one of `treeopt.engines.SETTINGS`.
        settings: values by the engine's names; empty where none could be derived.
        content: the settings as the engine takes them: JSON, or options of its command line; empty with them.
        replay: the promised steps; None without settings.
        batch: the smallest measured batch with drafts, which the promise is of; None where the length was given.
        bound: `exact` where the replay is of the engine's own drafts, `estimate` where it is of likely ones, `other
            drafter` where the engine does not have the drafter of the calibration.
        chain: whether the engine drafts a chain of one length: no tree, and no chain that ends earlier.
        budgets: the figures at each measured batch; empty without a profile.
        chains: tokens per step of chains of 0, 1, 2, ... drafts.
        underived: reasons, by setting.
        notes: what a user must know.
        warning: that the engine does not have the drafter of the calibration; empty where it has.
    """

    engine: str
    settings: Mapping[str, Any]
    content: str
    replay: Replay | None
    batch: int | None
    bound: str
    chain: bool
    budgets: Mapping[int, Budget]
    chains: tuple[float, ...]
    underived: Mapping[str, str]
    notes: tuple[str, ...]
    warning: str


def engine_settings(
    engine: str,
    calibration: Calibration,
    profile: LatencyProfile | None = None,
    *,
    drafts: int | None = None,
    nodes: int | None = None,
) -> EngineSettings:
    """The settings of an engine for the drafter of a calibration.

    Args:
        engine: one of `treeopt.engines.SETTINGS`.
        calibration: traces of the drafter that the engine will run.
        profile: seconds per step of that drafter on the machine that serves; without it `drafts` or `nodes` is needed.
        drafts: the length of the chain; None is the fastest.
        nodes: the size of the dynamic tree, root counted; None is the fastest.

    Raises:
        TreeoptError: E220 and E223 as in replay, E230 where the profile lacks what is needed, E303 where the
            calibration holds no text, E103 where a number is out of range.
        ValueError: where no engine has the name, it takes no such number, or the number is not whole.
    """
    check_choice("engine", engine, SETTINGS)
    known = SETTINGS[engine]
    for name, value, taken in (("drafts", drafts, known.chains), ("nodes", nodes, known.trees)):
        if value is not None and taken is None:
            raise ValueError(f"{engine} takes no {name}")
        if value is not None:
            check_counts(**{name: value})
    if drafts is not None and nodes is not None:
        raise ValueError("drafts are of a chain and nodes of a tree: one of them")
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    if drafts is not None and not 1 <= drafts < len(chain_tokens(calibration)):
        what = f"a chain of {drafts} drafts cannot be replayed"
        why = f"the calibration has {calibration.num_heads} levels, and chains have 16 drafts at most"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, at=f"--drafts {drafts}", why=why)
    found = settings_of(engine, Given(calibration, profile, drafts, nodes))
    return EngineSettings(
        engine,
        found.settings,
        _content(found),
        found.replay,
        found.batch,
        found.bound,
        found.chain,
        found.budgets,
        tuple(chain_tokens(calibration).tolist()),
        found.underived,
        found.notes,
        found.warning,
    )


def promised(found: EngineSettings, calibration: Calibration, drafts: int | None) -> Replay:
    """The steps to compare an engine's with: of a chain of as many drafts as it made, or those of other settings.

    Args:
        found: the settings.
        calibration: the traces that they were made from.
        drafts: the greatest number of drafts in the engine's histogram; None where it has none.

    Raises:
        TreeoptError: E101 where the engine drafts more levels than were traced, E230 where neither is known.
    """
    if not found.chain or drafts is None:
        if found.replay is None:
            what = "there is no promise to compare with: the engine's file and the options give no length"
            raise TreeoptError(Code.PROFILE_INVALID, what, fix="--profile, --drafts or --nodes")
        return found.replay
    if not 1 <= drafts < len(found.chains):
        what = f"the engine made {drafts} drafts a step, and chains are replayed to {len(found.chains) - 1}"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, why="the calibration has no more levels")
    return replay_chain(calibration, drafts)


def _content(found: Found) -> str:
    if not found.settings:
        return ""
    if not found.lines:
        return json.dumps(found.settings)
    return " ".join(f"{name} {value}" for name, value in found.settings.items())
