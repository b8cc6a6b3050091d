"""The trees and drafters of a decoder, given as records, as names of files, or as lists of paths; imports no torch."""

import os

from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import load_drafter
from treeopt.files.schedules import load_plan_for, load_planned
from treeopt.files.trees import GivenTree, as_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.schedule import Planned, Schedule
from treeopt.tree import Tree

GivenPlan = GivenTree | TreePolicy | Schedule


def as_plan(tree: GivenPlan) -> Planned:
    """The plan: given as a record, as a name of a file or of `treeopt list`, or as a list of paths."""
    if isinstance(tree, (Tree, TreePolicy, Schedule)):
        return tree
    return load_planned(tree) if isinstance(tree, (str, os.PathLike)) else as_tree(tree)


def as_plan_for(
    tree: GivenPlan | None, drafter: Drafter | str | os.PathLike[str] | None = None
) -> tuple[Planned, Drafter | None]:
    """The plan with the drafter that is given or, without one, that the tree's file names.

    Without a tree, the plan is the one that the drafter recommends; ValueError without both.
    """
    if isinstance(tree, (str, os.PathLike)) and drafter is None:
        return load_plan_for(tree)
    record = load_drafter(drafter) if isinstance(drafter, (str, os.PathLike)) else drafter
    if tree is not None:
        return as_plan(tree), record
    if record is None:
        raise ValueError(
            "give a tree, or a drafter with the tree that it recommends (treeopt learn); heads alone are not enough"
        )
    return plan_of(record, os.fspath(drafter) if isinstance(drafter, (str, os.PathLike)) else ""), record


def plan_of(drafter: Drafter, file: str = "") -> Plan:
    """The plan that a drafter recommends; E223, which names its file, where it recommends none."""
    if drafter.plan is None:
        model = drafter.source.get("model")
        named = f"drafter {drafter.id}" + (f" of {model}" if model else "")
        what = f"{f'{file}, {named},' if file else named} recommends no tree, and none was given"
        raise TreeoptError(
            Code.DRAFTER_MISMATCH,
            what,
            why="treeopt learn stores one; calibrate does not",
            fix="give a tree too: treeopt generate --tree FILE, treeopt render FILE",
        )
    return drafter.plan
