"""The tree as a networkx graph and as text; a picture of it as DOT, and in picture formats of the `dot` program."""

from __future__ import annotations

import graphviz
import networkx

from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree
from treeopt.view.layout import Kind
from treeopt.view.scene import Scene
from treeopt.view.theme import PALETTES


def to_graph(tree: Tree) -> networkx.DiGraph:
    """Nodes 0..N-1 with `path`, `label` and, where known, `value`; edges from parent to child."""
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
    return "\n".join(networkx.generate_network_text(to_graph(tree), sources=[0])) + "\n"


def render_dot(scene: Scene, title: str = "") -> str:
    """A picture in DOT, with `title` as its heading."""
    return str(_digraph(scene, title).source)


def render_with_dot(scene: Scene, file_format: str, title: str = "") -> bytes:
    """A picture as PNG, PDF or another format of graphviz, with `title` as its heading.

    Raises:
        TreeoptError: E401 where the `dot` program is missing, E204 where it does not know the format.
    """
    try:
        return bytes(_digraph(scene, title).pipe(format=file_format))
    except graphviz.ExecutableNotFound as error:
        raise TreeoptError(
            Code.PROGRAM_MISSING,
            f"a .{file_format} picture needs the program `dot`",
            why="treeopt writes .svg and .dot; graphviz draws all other formats",
            fix="install graphviz (Debian: apt-get install graphviz), or use -o tree.svg",
        ) from error
    except graphviz.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip() or "no message"
        raise TreeoptError(Code.FILE_UNWRITABLE, f"dot failed: {said.splitlines()[0]}", fix="-o tree.svg") from error
    except ValueError as error:
        raise TreeoptError(
            Code.FILE_UNWRITABLE, f"graphviz cannot write .{file_format} files", fix="-o tree.svg"
        ) from error


def _digraph(scene: Scene, title: str) -> graphviz.Digraph:
    """Items by their index; the accepted path is red, and the token after it dashed."""
    shown = graphviz.escape("".join(filter(str.isprintable, title)))
    graph = {"rankdir": "LR"} | ({"label": shown, "labelloc": "t"} if shown else {})
    dot = graphviz.Digraph("tree", graph_attr=graph, node_attr={"shape": "box", "fontsize": "10"})
    red = "#{:02x}{:02x}{:02x}".format(*PALETTES["light"].accepted)
    for i, (item, label) in enumerate(zip(scene.items, scene.labels, strict=True)):
        look = {"style": "dashed"} if item.kind is not Kind.NODE or scene.void(i) else {}
        look |= (
            {"color": red, "penwidth": "3"} if scene.accepted(i) else {"color": red} if item.kind is Kind.BONUS else {}
        )
        text = graphviz.escape(label or ("root" if not i and scene.step is None else ""))
        dot.node(str(i), text, tooltip=graphviz.escape(scene.tooltip(i)), **look)
        if i:
            dot.edge(str(item.parent), str(i), **{name: look[name] for name in look if name != "style"})
    return dot
