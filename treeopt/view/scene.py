"""What a picture of a tree shows, and where: items with labels and tooltips, the heading, the picture in words.

A column has three zones from left to right: the nodes, their labels, and the curves to the next column. Outside its
zone an edge is horizontal at the height of its own node, and nodes of one depth are a row or more apart, so no edge
meets a label, nor another node.
"""

import dataclasses
import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.drafted_step import DraftedStep
from treeopt.errors import Code, TreeoptError, counted
from treeopt.tree import ROOT, Tree

MAX_NODES = 2000  # of a picture
RADIUS, ROW = 5.0, 16.0
TOP, LEFT = 46.0, 20.0  # of the first row and of the first column's nodes
GAP = 4.0  # between a node and its label, a label and its edges, and at both ends of the curves
CURVE = 56.0  # width of the zone of curves
_COLUMN = 48.0  # least width of nodes and labels, for the column's name
CHARACTER = 7.0  # width of a label's character; monospaced fonts of 10 px have 6


@dataclass(frozen=True)
class Item:
    """One drawn node with its texts."""

    node: int  # the number of the node in the tree; of the bonus token that of the node above
    parent: int  # index of the item above; that of the root is itself
    depth: int  # 0 for the root
    bonus: bool = False  # whether it is the token after the accepted path
    label: str = ""  # beside the node; empty for none
    tooltip: str = ""  # shown where the pointer is on it
    # 0 .. 1, the square root of its share of the greatest value, which spreads small values; of a step of the
    # probability of its path in the base model. None without values
    share: float | None = None
    accepted: bool = False  # whether it is on the accepted path of a step
    void: bool = False  # whether it is a node of a step without a draft


def items_of(tree: Tree, *, most: int = MAX_NODES, accepted: Sequence[int] = (), bonus: bool = False) -> list[Item]:
    """What is drawn of a tree, without texts: the drawn nodes in their order, then the bonus token."""
    drawn = drawn_nodes(tree, most, accepted)
    index = {node: i for i, node in enumerate(drawn)}
    items = [Item(node, index[tree.parents[node]], tree.depths[node]) for node in drawn]
    if bonus:
        items.append(Item(accepted[-1], index[accepted[-1]], len(accepted), bonus=True))
    return items


def drawn_nodes(tree: Tree, most: int, first: Sequence[int] = ()) -> list[int]:
    """At most so many nodes, ascending: those of `first`, then of the greatest values (without values, the first)."""
    order = list(range(tree.nodes))
    if tree.values is not None:
        least = [1.0, *tree.values]  # on the node's path
        for node in range(1, tree.nodes):
            least[node] = min(least[node], least[tree.parents[node]])
        order.sort(key=lambda node: -least[node])  # stable, so that parents come before their children
    return sorted(list(dict.fromkeys([ROOT, *first, *order]))[:most])


@dataclass(frozen=True)
class Layout:
    """Where the items are, in pixels: their centres, and where the edges below them begin.

    `columns` has x of the nodes of each depth, `curves` both ends of the curves to the next depth.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    begin: tuple[float, ...]
    columns: tuple[float, ...]
    curves: tuple[tuple[float, float], ...]
    width: float
    height: float


def place(items: Sequence[Item], top: float = TOP) -> Layout:
    """Places of items with their labels: a column for each depth, from `top` a row for each item without children."""
    # Generous estimates: wide characters, such as those of Chinese, count twice.
    widths = [CHARACTER * sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in item.label) for item in items]
    columns = [0.0] * (1 + max(item.depth for item in items))
    for item, width in zip(items, widths, strict=True):
        columns[item.depth] = max(columns[item.depth], width + (GAP if width else 0.0))
    centers, curves, x = [], [], LEFT
    for column in columns:
        end = x + max(RADIUS + column, _COLUMN)
        centers.append(x)
        curves.append((end + 2 * GAP, end + 2 * GAP + CURVE))
        x = curves[-1][1] + GAP + RADIUS
    rows = _rows(items)
    x_of = [centers[item.depth] for item in items]
    ends = [2 * GAP + width if width else 0.0 for width in widths]
    return Layout(
        x=tuple(x_of),
        y=tuple(top + row * ROW for row in rows),
        begin=tuple(x + RADIUS + end for x, end in zip(x_of, ends, strict=True)),
        columns=tuple(centers),
        curves=tuple(curves),
        width=curves[-1][0] + GAP,
        height=top + max(rows) * ROW + ROW,
    )


def _rows(items: Sequence[Item]) -> list[float]:
    """Each item's row: the next free one without children, in depth-first order; else the mean of the children."""
    children: list[list[int]] = [[] for _ in items]
    for i, item in enumerate(items[1:], start=1):
        children[item.parent].append(i)
    rows, free = [0.0] * len(items), itertools.count()

    def choose(i: int) -> None:
        for child in children[i]:
            choose(child)
        below = [rows[child] for child in children[i]]
        rows[i] = sum(below) / len(below) if below else float(next(free))

    choose(0)
    return rows


NO_DRAFT = "∅"
_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_LONGEST = 16  # characters of a token in a label
_HINT = "Left to right: each column is one more draft token. Red: accepted. Dashed: the model's own next token."


def check_label(label: str, tree: Tree, step: DraftedStep | None) -> None:
    """Raise E107 where a tree lacks what its labels show."""
    if label == "probability" and step is None and tree.values is None and tree.paths:
        raise TreeoptError(
            Code.LABEL_UNKNOWN,
            "the tree has no values, and the labels are probabilities",
            why="published trees and lists of paths have no values; treeopt build writes them",
            fix="--label rank, or --example PROMPT for the probabilities of one step",
        )
    if label == "token" and step is None:
        what = "the nodes of a tree have ranks, and no tokens"
        raise TreeoptError(Code.LABEL_UNKNOWN, what, why="a token is drafted for a text", fix="--example PROMPT")


def label_of(tree: Tree, item: Item, label: str, step: DraftedStep | None = None) -> str:
    """The label of an item; empty where it has none."""
    if label == "none":
        return ""
    if item.bonus:
        return "" if step is None else shortened(visible(step.bonus_text))
    if label == "token" and step is not None:
        return shortened(visible(step.texts[item.node])) if step.tokens[item.node] is not None else NO_DRAFT
    if item.node == ROOT:
        return ""
    if label == "rank":
        return str(tree.paths[item.node - 1][-1])
    value = tree.values[item.node - 1] if step is None and tree.values is not None else None
    return short_probability(value if step is None else step.probabilities[item.node])


def short_probability(value: float | None) -> str:
    """A probability in at most five characters: `1`, `.53`, `.048`, `3e-4`; empty where there is none."""
    if value is None:
        return ""
    if value >= 0.995:
        return "1"
    if value >= 0.0995:
        return f"{value:.2f}"[1:]
    if value >= 0.00095:
        return f"{value:.3f}"[1:]
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def visible(text: str) -> str:
    """A token's text with visible white space; other characters that are not printed as their escapes."""
    return "".join(_VISIBLE.get(one) or (one if _printed(one) else ascii(one)[1:-1]) for one in text)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """The text, cut at a number of characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _printed(character: str) -> bool:
    """Whether a character takes room of its own; marks that combine with others do not, and neither do unassigned."""
    return character.isprintable() and unicodedata.category(character) not in ("Mn", "Me")


def describe(tree: Tree, node: int, step: DraftedStep | None = None) -> str:
    """The tooltip of a node: path, value and, of a step, its token."""
    if node == ROOT:
        text = "root: the base model's token"
    else:
        path = tree.paths[node - 1]
        level = "level" if tree.drafter or step is not None else "head"
        text = f"node {node}: path {list(path)}, rank {path[-1]} of {level} {len(path)}"
        if tree.values is not None:
            text += f", right with probability {tree.values[node - 1]:.4g}"
    return text if step is None else f"{_token(step, node)}; {text}"


def _token(step: DraftedStep, node: int) -> str:
    """The token of a node in words, with the base model's probability."""
    if step.tokens[node] is None:
        return "no draft"
    text = f"token {step.tokens[node]} '{visible(step.texts[node])}'"
    if node in step.accepted:
        text += " (accepted)" if node else ""
    chance = step.probabilities[node]
    return text if chance is None else f"{text}, probability {chance:.4g} in the base model"


def describe_item(tree: Tree, item: Item, step: DraftedStep | None = None) -> str:
    """The tooltip of an item."""
    if item.bonus and step is not None:
        return f"token {step.bonus} '{visible(step.bonus_text)}': the base model's token after the accepted path"
    return describe(tree, item.node, step)


def summary(tree: Tree) -> str:
    """`16 nodes, depth 4, 8 leaves`."""
    return f"{counted(tree.nodes, 'node')}, depth {tree.depth}, {counted(len(tree.leaves), 'leaf')}"


def heading(tree: Tree, title: str, drawn: int, step: DraftedStep | None = None) -> str:
    """The heading of a picture, with the number of drawn nodes where it is not all."""
    default = summary(tree)
    if step is not None:
        default = f"step {step.number} after “{shortened(visible_line(step.prompt), 40)}”: {default}"
    text = "".join(filter(str.isprintable, title)) or default
    text += f", of drafter {tree.drafter}" if tree.drafter and step is None else ""
    return f"{text} ({drawn:,} drawn)" if drawn < tree.nodes else text


def visible_line(text: str) -> str:
    """A text on one line: white space but spaces is visible."""
    return "".join(one if one == " " else visible(one) for one in text)


def description(tree: Tree, step: DraftedStep | None = None) -> str:
    """The picture in words: the size of the tree, its most probable path, and the accepted path."""
    parts = [f"A tree of {summary(tree)}."]
    if tree.values:
        leaf = max(tree.leaves, key=lambda node: tree.values[node - 1] if tree.values else 0.0)
        parts.append(f"Most probable path: {list(tree.paths[leaf - 1])}, with probability {tree.values[leaf - 1]:.4g}.")
    if step is not None:
        parts.append(accepted_words(step))
    return " ".join(parts)


def accepted_words(step: DraftedStep) -> str:
    """The accepted path of a step in words."""
    root, *drafts = (f"'{visible(step.texts[node])}'" for node in step.accepted)
    path = f", {counted(len(drafts), 'draft')} accepted: {' '.join(drafts)}" if drafts else ", no draft accepted"
    after = "" if step.bonus is None else f"; the next token is '{visible(step.bonus_text)}'"
    return f"Step {step.number}: after the root {root}{path}{after}."


@dataclass(frozen=True)
class Scene:
    """What a picture of a tree shows in any format, with all of its texts."""

    heading: str  # with the number of all nodes
    description: str  # the picture in words
    level: str  # what a column is: `level`, or `head` in a tree of heads alone
    hint: str  # how to read the picture; of a step alone
    items: tuple[Item, ...]  # in the order of `items_of`


def scene_of(
    tree: Tree, title: str = "", *, label: str = "rank", step: DraftedStep | None = None, most: int = MAX_NODES
) -> Scene:
    """The scene of a tree, or of one step, with arguments as those of `treeopt.view.svg.render_svg`."""
    check_label(label, tree, step)
    red = () if step is None else step.accepted
    items = items_of(tree, most=most, accepted=red, bonus=step is not None and step.bonus is not None)
    shares = _shares(tree, step)
    drawn = [
        dataclasses.replace(
            item,
            label=label_of(tree, item, label, step),
            tooltip=describe_item(tree, item, step),
            share=None if item.bonus else shares[item.node],
            accepted=not item.bonus and item.node in red,
            void=not item.bonus and step is not None and step.tokens[item.node] is None,
        )
        for item in items
    ]
    level = "level" if tree.drafter or step is not None else "head"
    words = heading(tree, title, sum(not item.bonus for item in items), step), description(tree, step)
    return Scene(*words, level, "" if step is None else _HINT, tuple(drawn))


def _shares(tree: Tree, step: DraftedStep | None) -> Sequence[float | None]:
    if step is not None:
        chances = [1.0] * tree.nodes
        for node in range(1, tree.nodes):
            chances[node] = chances[tree.parents[node]] * (step.probabilities[node] or 0.0)
        return [chance**0.5 for chance in chances]
    if tree.values is None:
        return [None] * tree.nodes
    greatest = max(tree.values, default=1.0) or 1.0
    return [1.0, *((value / greatest) ** 0.5 for value in tree.values)]


def drawn_data(tree: Tree, *, label: str = "rank", step: DraftedStep | None = None) -> dict[str, Any]:
    """The drawn nodes, and of a step its tokens and the accepted path, for JSON."""
    drawn = [_row(tree, one, step) for one in scene_of(tree, label=label, step=step).items if not one.bonus]
    if step is None:
        return {"drawn": drawn}
    return {
        "drawn": drawn,
        "step": step.number,
        "prompt": step.prompt,
        "accepted": list(step.accepted),
        "accepted_tokens": list(step.accepted_tokens),
        "accepted_texts": [step.texts[node] for node in step.accepted],
        "bonus": None if step.bonus is None else {"token": step.bonus, "text": step.bonus_text},
    }


def _row(tree: Tree, one: Item, step: DraftedStep | None) -> dict[str, Any]:
    node = one.node
    found: dict[str, Any] = {"kind": "node", "label": one.label, "node": node}
    found |= {"parent": None, "path": [], "value": None}
    if node != ROOT:
        found |= {"parent": tree.parents[node], "path": list(tree.paths[node - 1])}
        found["value"] = None if tree.values is None else tree.values[node - 1]
    if step is None:
        return found
    token = {"token": step.tokens[node], "text": step.texts[node], "probability": step.probabilities[node]}
    return {**found, **token, "accepted": one.accepted}
