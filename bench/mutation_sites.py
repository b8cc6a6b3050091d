"""The faults that bench/mutation.py can plant: places in the source, found in the syntax tree, with a changed text.

A fault changes one expression or statement. Not changed are texts, annotations, decorators, assertions, and whatever
is inside of a `raise`, a `TreeoptError`, an f-string or a call that prints or warns.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATOR = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PAIRS = [
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("cumsum", "cumprod"),
    ("sum", "prod"),
    ("zeros", "ones"),
    ("append", "insert"),
]
_EXTREME = {one: other for pair in _PAIRS[:-1] for one, other in (pair, pair[::-1])} | {"sorted": "list"}
_SILENT = {"TreeoptError", "print", "warn", "warning", "echo", "info", "debug", "isinstance", "issubclass", "cast"}
_LARGE = 100  # limits and sizes, where one more or less is no fault
_SYMMETRIC = {"min", "max", "minimum", "maximum", "isclose", "allclose", "hypot", "gcd", "equal", "array_equal"}
KINDS = {
    "boundary": "< to <=, > to >=, and back",
    "compare": "< to >=, == to !=, in to not in, is to is not, and back",
    "index": "a number in an index or a slice plus one",
    "constant": "a number plus one; a fraction or a large number doubled",
    "boolean": "True to False, and to or, not x to x, and back",
    "swap": "the first two arguments of a call exchanged",
    "condition": "a condition removed: never true before return, raise, continue or break; else always true",
    "operator": "+ to -, * to /, & to |, << to >>, and back; // and ** to *, % to //",
    "extreme": "min to max, any to all, floor to ceil, sum to prod, zeros to ones, and back; sorted to list",
    "statement": "a call whose result is not used removed; += to -=",
}


@dataclass(frozen=True)
class Fault:
    """One change of one file.

    `id` is FILE:FUNCTION:KIND:NUMBER, where NUMBER counts the faults of this kind in the function; `lines` are those of
    its statement; `start` and `end` are offsets of the replaced bytes. `scope` has the lines of the function whose
    default values these are, or None in a function's body. Code that runs at import has (0, 0).
    """

    id: str
    path: str
    line: int
    kind: str
    before: str
    after: str
    lines: tuple[int, int]
    scope: tuple[int, int] | None
    start: int
    end: int

    @property
    def room(self) -> str:
        """The folder below treeopt, or `records` for the modules at its top."""
        return self.path.split("/")[0] if "/" in self.path else "records"

    def planted(self, source: bytes) -> bytes:
        """The source of the file with the fault."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def faults_of(source: bytes, path: str) -> list[Fault]:
    """All faults of a file, in the order of the source."""
    finder = _Finder(source, path)
    finder.visit(ast.parse(source))
    return finder.found


def chosen(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """`count` faults, kinds in turn, in an order that does not depend on the other faults."""
    queues = defaultdict(list)
    for fault in sorted(faults, key=lambda one: hashlib.sha256(f"{seed} {one.id}".encode()).digest()):
        queues[fault.kind].append(fault)
    turns = itertools.zip_longest(*(queues[kind] for kind in KINDS))
    return [fault for turn in turns for fault in turn if fault is not None][:count]


class _Finder(ast.NodeVisitor):
    """Collects the faults of one file."""

    def __init__(self, source: bytes, path: str):
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Fault] = []
        self.names: list[str] = []
        self.scope: tuple[int, int] | None = (0, 0)
        self.lines = (1, 1)
        self.numbers: Counter[tuple[str, str]] = Counter()
        self.indexed: set[int] = set()  # constants of an index

    def add(self, node: ast.expr | ast.stmt, kind: str, after: ast.AST | str) -> None:
        """Note a fault that replaces a node."""
        text = after if isinstance(after, str) else f"({ast.unparse(after)})"
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        function = ".".join(self.names) or "module"
        number = self.numbers[function, kind] = self.numbers[function, kind] + 1
        name = f"{self.path}:{function}:{kind}:{number}"
        before = " ".join(self.source[start:end].decode().split())
        self.found.append(Fault(name, self.path, node.lineno, kind, before, text, self.lines, self.scope, start, end))

    # What holds statements.

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.names, self.scope, self.lines
        self.names = [*self.names, node.name]
        body = _statements(node)
        # Default values are computed where the function is defined; the tests of its body see them.
        self.scope = (node.lineno, node.end_lineno or node.lineno)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.scope = None
        for statement in body:
            self.visit(statement)
        self.names, self.scope, self.lines = outer

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.names = self.names, [*self.names, node.name]
        for statement in _statements(node):
            self.visit(statement)
        self.names = outer

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and note the lines of its statement."""
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            self.lines = (node.lineno, max(last, node.lineno))
        super().visit(node)

    # What is left as it is.

    def _nothing(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Match = _nothing

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.generic_visit(node)

    # What is changed.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _name(node.value.func) not in _SILENT:
            self.add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _OPERATOR:
            changed = ast.AugAssign(node.target, _OPERATOR[type(node.op)](), node.value)
            self.add(node, "statement", ast.unparse(changed))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if _name(node.test) == "TYPE_CHECKING":
            return
        self._condition(node.test, leaves=isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test, leaves=False)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for one in node.ifs:
            self._condition(one, leaves=False)
        self.generic_visit(node)

    def _condition(self, test: ast.expr, *, leaves: bool) -> None:
        self.add(test, "condition", "(False)" if leaves else "(True)")

    def visit_Compare(self, node: ast.Compare) -> None:
        for kind, table in (("boundary", _BOUNDARY), ("compare", _OPPOSITE)):
            if type(node.ops[0]) in table:
                changed = copy.deepcopy(node)
                changed.ops[0] = table[type(node.ops[0])]()
                self.add(node, kind, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATOR and not _is_text(node.left) and not _is_text(node.right):
            self.add(node, "operator", ast.BinOp(node.left, _OPERATOR[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "boolean", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "boolean", node.operand)
        elif isinstance(node.op, ast.Invert | ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add(node, "operator", node.operand)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            for one in (part.lower, part.upper, part.step) if isinstance(part, ast.Slice) else (part,):
                number = one.operand if isinstance(one, ast.UnaryOp) else one
                if isinstance(number, ast.Constant) and type(number.value) is int:
                    self.indexed.add(id(number))
                    self.add(number, "index", f"({number.value + 1})")
                elif isinstance(part, ast.Slice) and one is not None:
                    self.add(one, "index", ast.BinOp(one, ast.Add(), ast.Constant(1)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "boolean", ast.Constant(not node.value))
        elif type(node.value) is int and id(node) not in self.indexed:
            self.add(node, "constant", ast.Constant(node.value + 1 if node.value < _LARGE else node.value * 2))
        elif isinstance(node.value, float):
            self.add(node, "constant", ast.Constant(node.value * 2 or 1.0))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "help"):  # zip(strict=True) finds our own mistakes
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in _SILENT:
            return
        if name in _EXTREME:
            changed = copy.deepcopy(node)
            _rename(changed.func, _EXTREME[name])
            if not (name == "sorted" and node.keywords):
                self.add(node, "extreme", changed)
        first = node.args[:2]
        starred = any(isinstance(one, ast.Starred) for one in first)
        if len({ast.dump(one) for one in first}) == 2 and not starred and name not in _SYMMETRIC:
            self.add(node, "swap", ast.Call(node.func, [first[1], first[0], *node.args[2:]], node.keywords))
        self.generic_visit(node)


def _statements(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[ast.stmt]:
    """The body without its docstring."""
    for statement in node.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield statement


def _name(node: ast.expr) -> str:
    """The last part of a dotted name, or nothing."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _rename(node: ast.expr, name: str) -> None:
    """Change the last part of a dotted name in place."""
    if isinstance(node, ast.Name):
        node.id = name
    elif isinstance(node, ast.Attribute):
        node.attr = name


def _is_text(node: ast.expr) -> bool:
    """Whether an operand is a literal text, or joined texts."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
