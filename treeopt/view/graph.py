"""The tree as a networkx graph, as text, as DOT, and in picture formats of the `dot` program."""

from __future__ import annotations

import graphviz
import networkx

from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree
from treeopt.view.svg import describe


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


def render_dot(tree: Tree) -> str:
    """The tree in DOT."""
    return str(_digraph(tree).source)


def render_with_dot(tree: Tree, file_format: str) -> bytes:
    """The tree as PNG, PDF or another format of graphviz.

    Raises:
        TreeoptError: E401 where the `dot` program is missing, E204 where it does not know the format.
    """
    try:
        return bytes(_digraph(tree).pipe(format=file_format))
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


def _digraph(tree: Tree) -> graphviz.Digraph:
    graph = to_graph(tree)
    dot = graphviz.Digraph("tree", graph_attr={"rankdir": "LR"}, node_attr={"shape": "box", "fontsize": "10"})
    for node, data in graph.nodes(data=True):
        dot.node(str(node), data["label"], tooltip=describe(tree, node))
    dot.edges((str(parent), str(child)) for parent, child in graph.edges)
    return dot
