"""The geometry of a picture of a tree, read from its SVG alone: boxes of labels, lines of edges, circles of nodes."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np

SVG = "{http://www.w3.org/2000/svg}"
ADVANCE = 6.6  # pixels of a character at 10 px; that of common monospaced fonts is 6.0 to 6.1
ASCENT, DESCENT = 8.0, 2.5  # of a label, from its baseline
HEADING_ADVANCE = 7.5
POINTS = 60  # of a part of an edge


@dataclass(frozen=True)
class Box:
    """A rectangle, and the number of the item that it belongs to."""

    left: float
    top: float
    right: float
    bottom: float
    item: int

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def label_boxes(root: ElementTree.Element) -> list[Box]:
    """The boxes of all labels; items are the groups, in their order."""
    boxes = []
    for item, group in enumerate(root.findall(f"{SVG}g")):
        for text in group.findall(f"{SVG}text"):
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            width = ADVANCE * sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in text.text or "")
            boxes.append(Box(x, y - ASCENT, x + width, y + DESCENT, item))
    return boxes


def node_boxes(root: ElementTree.Element) -> list[Box]:
    """The squares around all nodes, their outlines included."""
    boxes = []
    for item, group in enumerate(root.findall(f"{SVG}g")):
        for shape in group:
            at = shape.attrib
            if shape.tag == f"{SVG}circle":
                x, y, r = float(at["cx"]), float(at["cy"]), float(at["r"]) + 0.75
                boxes.append(Box(x - r, y - r, x + r, y + r, item))
            elif shape.tag == f"{SVG}rect":
                x, y = float(at["x"]), float(at["y"])
                boxes.append(Box(x, y, x + float(at["width"]), y + float(at["height"]), item))
    return boxes


def heading_boxes(root: ElementTree.Element) -> list[Box]:
    """The boxes of the heading and of the names of columns."""
    boxes = []
    for text in root.findall(f"{SVG}text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        size = 13 if text.attrib["class"] == "title" else 10
        boxes.append(Box(x, y - 0.8 * size, x + HEADING_ADVANCE * size / 13 * len(text.text or ""), y + 3, -1))
    return boxes


def edge_points(path: ElementTree.Element) -> np.ndarray:
    """Points [n, 2] along an edge."""
    found, at = [], np.zeros(2)
    for verb, numbers in re.findall(r"([MHC])([^MHC]*)", path.attrib["d"]):
        values = [float(one) for one in numbers.split()]
        share = np.linspace(0, 1, POINTS)[:, None]
        if verb == "M":
            at = np.array(values)
        elif verb == "H":
            end = np.array([values[0], at[1]])
            found.append(at + (end - at) * share)
            at = end
        else:
            first, second, end = np.array(values).reshape(3, 2)
            rest = 1 - share
            found.append(at * rest**3 + 3 * first * rest**2 * share + 3 * second * rest * share**2 + end * share**3)
            at = end
    return np.concatenate(found)


def met_boxes(points: np.ndarray, boxes: list[Box], margin: float) -> list[Box]:
    """The boxes that a line through these points, so much thicker to each side, meets.

    A part of the line between two points counts as the rectangle around it, so rather too much is found.
    """
    if not boxes:
        return []
    low, high = np.minimum(points[1:], points[:-1]) - margin, np.maximum(points[1:], points[:-1]) + margin
    sides = np.array([(box.left, box.top, box.right, box.bottom) for box in boxes])
    meets = (low[:, None] < sides[None, :, 2:]) & (high[:, None] > sides[None, :, :2])
    return [boxes[i] for i in np.flatnonzero(meets.all(-1).any(0))]


def faults(text: str) -> list[str]:
    """What overlaps in a picture, or lies outside it; empty for a good one."""
    root = ElementTree.fromstring(text)
    labels, nodes = label_boxes(root), node_boxes(root)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    found = [
        f"box of {box.item} is outside"
        for box in [*labels, *nodes, *heading_boxes(root)]
        if box.left < 0 or box.top < 0 or box.right > width or box.bottom > height
    ]
    headings = heading_boxes(root)
    for i, one in enumerate(headings):
        found += [f"headings {one} and {other}" for other in [*headings[:i], *labels, *nodes] if one.meets(other)]
    for i, one in enumerate(labels):
        found += [f"labels {one.item} and {other.item}" for other in labels[:i] if one.meets(other)]
        found += [f"label {one.item} and node {other.item}" for other in nodes if one.meets(other)]
    for i, one in enumerate(nodes):
        found += [f"nodes {one.item} and {other.item}" for other in nodes[:i] if one.meets(other)]
    for number, path in enumerate(root.findall(f"{SVG}path")):
        points, half = edge_points(path), float(path.attrib["stroke-width"]) / 2
        if (
            points[:, 0].min() < 0
            or points[:, 0].max() > width
            or points[:, 1].min() < 0
            or points[:, 1].max() > height
        ):
            found.append(f"edge {number} is outside")
        found += [f"edge {number} and label {box.item}" for box in met_boxes(points, labels, half)]
        for box in met_boxes(points, nodes, half):
            x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
            if not any(abs(x - end[0]) < 8 and abs(y - end[1]) < 1 for end in (points[0], points[-1])):
                found.append(f"edge {number} and node {box.item}")
    return found
