"""What a picture of a tree shows, in any format: items, labels, tooltips, classes and shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.drafted_step import DraftedStep
from treeopt.tree import ROOT, Tree
from treeopt.view.layout import MAX_NODES, Item, Kind, items_of
from treeopt.view.words import check_label, describe_item, label_of


@dataclass(frozen=True)
class Scene:
    """The items of a picture.

    Args:
        tree: the tree.
        step: one step of a text with this tree; None for the tree alone.
        items: what is drawn.
        labels: of each item; empty for none.
        shares: for each item 0 .. 1, the square root of its share of the greatest value, which spreads small values;
            None without values.
    """

    tree: Tree
    step: DraftedStep | None
    items: tuple[Item, ...]
    labels: tuple[str, ...]
    shares: tuple[float | None, ...]

    @property
    def nodes(self) -> int:
        """The number of nodes of the tree that are drawn."""
        return sum(item.kind is Kind.NODE for item in self.items)

    def accepted(self, i: int) -> bool:
        """Whether an item is on the accepted path."""
        return self.step is not None and self.items[i].kind is Kind.NODE and self.items[i].node in self.step.accepted

    def void(self, i: int) -> bool:
        """Whether an item is a node without a draft."""
        item = self.items[i]
        return self.step is not None and item.kind is Kind.NODE and self.step.tokens[item.node] is None

    def tooltip(self, i: int) -> str:
        """The tooltip of an item."""
        return describe_item(self.tree, self.items[i], self.step)

    def as_dict(self) -> dict[str, Any]:
        """The drawn nodes, and of a step its tokens and the accepted path, for JSON."""
        drawn = [self._row(i) for i in range(len(self.items)) if self.items[i].kind is not Kind.BONUS]
        if self.step is None:
            return {"drawn": drawn}
        step = self.step
        return {
            "drawn": drawn,
            "step": step.number,
            "prompt": step.prompt,
            "accepted": list(step.accepted),
            "accepted_tokens": list(step.accepted_tokens),
            "accepted_texts": [step.texts[node] for node in step.accepted],
            "bonus": None if step.bonus is None else {"token": step.bonus, "text": step.bonus_text},
        }

    def _row(self, i: int) -> dict[str, Any]:
        item = self.items[i]
        above = item.node if item.kind is Kind.COLLAPSED else self.tree.parents[item.node]
        row: dict[str, Any] = {"kind": item.kind.value, "label": self.labels[i]}
        if item.kind is Kind.COLLAPSED:
            return {**row, "parent": above, "nodes": item.hidden, "value": item.value}
        path = self.tree.paths[item.node - 1] if item.node != ROOT else ()
        values = self.tree.values
        value = values[item.node - 1] if values is not None and item.node != ROOT else None
        row |= {"node": item.node, "parent": None if item.node == ROOT else above, "path": list(path), "value": value}
        if self.step is None:
            return row
        step, node = self.step, item.node
        more = {"token": step.tokens[node], "text": step.texts[node], "probability": step.probabilities[node]}
        return {**row, **more, "accepted": self.accepted(i)}


def scene_of(tree: Tree, *, label: str = "rank", step: DraftedStep | None = None, most: int = MAX_NODES) -> Scene:
    """The picture of a tree, or of one step.

    Args:
        tree: the tree; of a step `step.tree`.
        label: of `treeopt.view.looks.LABELS`.
        step: one step of a text.
        most: items that are drawn; larger trees are collapsed.

    Raises:
        TreeoptError: E107 where the labels are probabilities or tokens, and the tree has none.
    """
    check_label(label, tree, step)
    red = () if step is None else step.accepted
    items = items_of(tree, most=most, accepted=red, bonus=step is not None and step.bonus is not None)
    labels = tuple(label_of(tree, item, label, step) for item in items)
    shares = _shares(tree, step)
    return Scene(
        tree, step, tuple(items), labels, tuple(shares[one.node] if one.kind is Kind.NODE else None for one in items)
    )


def _shares(tree: Tree, step: DraftedStep | None) -> Sequence[float | None]:
    """Of each node; of a step by the probability of its path in the base model."""
    if step is not None:
        chances = [1.0] * tree.nodes
        for node in range(1, tree.nodes):
            chances[node] = chances[tree.parents[node]] * (step.probabilities[node] or 0.0)
        return [chance**0.5 for chance in chances]
    if tree.values is None:
        return [None] * tree.nodes
    greatest = max(tree.values, default=1.0) or 1.0
    return [1.0, *((value / greatest) ** 0.5 for value in tree.values)]
