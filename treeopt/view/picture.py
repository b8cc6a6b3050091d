"""A tree, or one step of a text, as the content of a picture file."""

from __future__ import annotations

from treeopt.drafted_step import DraftedStep
from treeopt.tree import Tree


def render(
    tree: Tree,
    file_format: str,
    *,
    title: str = "",
    label: str = "rank",
    step: DraftedStep | None = None,
    theme: str = "auto",
) -> bytes:
    """The content of an .svg or .dot file, or of another format of the `dot` program.

    Args:
        tree: the tree; of a step `step.tree`.
        file_format: a suffix without its dot.
        title: the heading; where it is empty an .svg file has a summary, and other formats have none.
        label: of `treeopt.view.looks.LABELS`.
        step: one step of a text, whose tokens and accepted path are drawn.
        theme: of `treeopt.view.looks.THEMES`, for .svg files.

    Raises:
        TreeoptError: E107 where the tree lacks what its labels show, E401 where the `dot` program is needed and
            missing, E204 where it does not know the format.
    """
    if file_format == "svg":
        from treeopt.view.svg import render_svg

        return render_svg(tree, title, label=label, step=step, theme=theme).encode()
    from treeopt.view.graph import render_dot, render_with_dot
    from treeopt.view.scene import scene_of

    scene = scene_of(tree, label=label, step=step)
    if file_format in ("dot", "gv"):
        return render_dot(scene, title).encode()
    return render_with_dot(scene, file_format, title)
