"""A tree as the content of a picture file."""

from __future__ import annotations

from treeopt.tree import Tree


def render(tree: Tree, file_format: str, *, title: str = "") -> bytes:
    """The content of an .svg or .dot file, or of another format of the `dot` program.

    Raises:
        TreeoptError: E401 where the `dot` program is needed and missing, E204 where it does not know the format.
    """
    if file_format == "svg":
        from treeopt.view.svg import render_svg

        return render_svg(tree, title).encode()
    from treeopt.view.graph import render_dot, render_with_dot

    return render_dot(tree).encode() if file_format in ("dot", "gv") else render_with_dot(tree, file_format)
