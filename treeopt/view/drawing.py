"""A picture of a tree as data, with all of its texts: `treeopt.view.svg` needs nothing else, and reports embed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeopt.tree import Tree
from treeopt.view.layout import Item, Kind
from treeopt.view.scene import Scene, scene_of
from treeopt.view.theme import shade
from treeopt.view.words import description, heading


@dataclass(frozen=True)
class DrawnItem:
    """One drawn node: an item, its label and tooltip, and its share as in `Scene`; what it is on a step's path."""

    item: Item
    label: str
    tooltip: str
    share: float | None
    accepted: bool = False
    void: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes beside `node` or `edge`."""
        found = [] if self.share is None else [f"s{shade(self.share)}"]
        found += [] if self.item.kind is Kind.NODE else [self.item.kind.value]
        return (*found, *(["accepted"] if self.accepted else []), *(["void"] if self.void else []))


@dataclass(frozen=True)
class Drawing:
    """What a picture shows.

    Args:
        heading: with the number of all nodes.
        description: the picture in words.
        level: what a column is: `level`, or `head` in a tree of heads alone.
        of_step: whether it is one step of a text.
        items: in the order of `items_of`.
    """

    heading: str
    description: str
    level: str
    of_step: bool
    items: tuple[DrawnItem, ...]

    @classmethod
    def of(cls, scene: Scene, title: str = "") -> Drawing:
        """That of a scene; `title` replaces the summary in the heading."""
        tree, step = scene.tree, scene.step
        items = (
            DrawnItem(
                item, scene.labels[i], scene.tooltip(i), scene.shares[i], accepted=scene.accepted(i), void=scene.void(i)
            )
            for i, item in enumerate(scene.items)
        )
        return cls(
            heading(tree, title, scene.nodes, step),
            description(tree, scene.items, step),
            "level" if tree.drafter or step is not None else "head",
            step is not None,
            tuple(items),
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Drawing:
        """That of the data of `drawing_data`."""
        items = (
            DrawnItem(
                Item(Kind(one["kind"]), one["node"], one["parent"], one["depth"]),
                one["label"],
                one["tooltip"],
                one["share"],
            )
            for one in data["items"]
        )
        return cls(data["heading"], data["description"], data["level"], False, tuple(items))


def drawing_data(tree: Tree, most: int) -> dict[str, Any]:
    """The drawing of a tree in types of JSON; of a tree with more than `most` nodes the rest is collapsed."""
    drawing = Drawing.of(scene_of(tree, most=most))
    items = [
        {
            "kind": one.item.kind.value,
            "node": one.item.node,
            "parent": one.item.parent,
            "depth": one.item.depth,
            "label": one.label,
            "tooltip": one.tooltip,
            "share": one.share,
        }
        for one in drawing.items
    ]
    return {
        "heading": drawing.heading,
        "description": drawing.description,
        "level": drawing.level,
        "items": items,
    }
