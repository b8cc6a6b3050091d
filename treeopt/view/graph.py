"""The tree as a networkx graph and as text; a picture of it as DOT, and in picture formats of the `dot` program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import graphviz

from treeopt.drafted_step import DraftedStep
from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree
from treeopt.view.scene import Scene, scene_of
from treeopt.view.svg import PALETTES, render_svg

if TYPE_CHECKING:
    import networkx


def to_graph(tree: Tree) -> networkx.DiGraph:
    """Nodes 0..N-1 with `path`, `label` and, where known, `value`; edges from parent to child."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_node(0, path=(), label="root")
    values = tree.values or (None,) * len(tree.paths)
    for node, (path, value) in enumerate(zip(tree.paths, values, strict=True), start=1):
        label = str(path[-1]) if value is None else f"{path[-1]}  {value:.4f}"
        graph.add_node(node, path=path, label=label, **({} if value is None else {"value": value}))
        graph.add_edge(tree.parents[node], node)
    return graph


def render_text(tree: Tree) -> str:
    """The tree as text: one line for each node, `rank  value`, children below their parent."""
    import networkx

    return "\n".join(networkx.generate_network_text(to_graph(tree), sources=[0])) + "\n"


def _piped(dot: graphviz.Digraph, file_format: str) -> bytes:
    """The picture as PNG, PDF or another format of graphviz."""
    try:
        return bytes(dot.pipe(format=file_format))
    except graphviz.ExecutableNotFound as error:
        raise TreeoptError(
            Code.PROGRAM_MISSING,
            f"a .{file_format} picture needs the program `dot`",
            why="treeopt writes .svg and .dot; graphviz draws all other formats",
            fix="install graphviz (Debian: apt-get install graphviz), or use -o tree.svg",
        ) from error
    except (graphviz.CalledProcessError, ValueError) as error:
        said = bytes(getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
        what = f"graphviz cannot write a .{file_format} file: {said.splitlines()[0]}"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="-o tree.svg") from error


def _digraph(scene: Scene, title: str) -> graphviz.Digraph:
    """Items by their index; the accepted path is red, and the token after it dashed."""
    shown = graphviz.escape("".join(filter(str.isprintable, title)))
    graph = {"rankdir": "LR"} | ({"label": shown, "labelloc": "t"} if shown else {})
    dot = graphviz.Digraph("tree", graph_attr=graph, node_attr={"shape": "box", "fontsize": "10"})
    red = PALETTES["light"]["accepted"]
    for i, one in enumerate(scene.items):
        look = {"style": "dashed"} if one.bonus or one.void else {}
        look |= {"color": red, "penwidth": "3"} if one.accepted else {"color": red} if one.bonus else {}
        text = graphviz.escape(one.label or ("root" if not i and not scene.hint else ""))
        dot.node(str(i), text, tooltip=graphviz.escape(one.tooltip), **look)
        if i:
            dot.edge(str(one.parent), str(i), **{name: look[name] for name in look if name != "style"})
    return dot


def render(
    tree: Tree,
    file_format: str,
    *,
    title: str = "",
    label: str = "rank",
    step: DraftedStep | None = None,
    theme: str = "auto",
) -> bytes:
    """The content of an .svg or .dot file, or of another format (a suffix without its dot) of the `dot` program.

    Without a title an .svg file has a summary as its heading, and other formats have none.
    """
    if file_format == "svg":
        return render_svg(tree, title, label=label, step=step, theme=theme).encode()
    dot = _digraph(scene_of(tree, label=label, step=step), title)
    return str(dot.source).encode() if file_format in ("dot", "gv") else _piped(dot, file_format)
