"""The shape of a model: its matrices and its attention, from which FLOPs and bytes of a step follow.

A shape holds no weights. Layers of equal matrices are one entry with their number.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from treeopt.errors import Code, TreeoptError, counted

MOST = 1 << 40  # of any count of a shape; larger numbers are typing errors
MOST_SECONDS = 86400.0  # of a part of a step: a day


@dataclass(frozen=True)
class Matrix:
    """Weights that multiply every token, in one or more layers.

    Raises:
        TreeoptError: E240 where a number is not whole or below 1, or more copies are active than exist.
    """

    name: str  # of the layer in the model, such as `q_proj`
    rows: int  # outputs
    columns: int  # inputs
    count: int = 1  # layers that have it
    experts: int = 1  # E, copies in each layer of which a router chooses; 1 without experts
    active: int = 1  # k, copies that one token passes through

    def __post_init__(self) -> None:
        check_numbers(self.name, self, ("rows", "columns", "count", "experts", "active"))
        if self.active > self.experts:
            raise shape_error(f"{self.name}: {self.active} of {self.experts} experts are active")

    @property
    def parameters(self) -> int:
        """Weights of all layers and experts."""
        return self.rows * self.columns * self.count * self.experts


@dataclass(frozen=True)
class Attention:
    """Attention layers of one kind.

    Raises:
        TreeoptError: E240 where a number is not whole or below 1, or query heads are not a multiple of key heads.
    """

    layers: int  # their number
    heads: int  # n, query heads
    kv_heads: int  # heads of keys and values; fewer than `heads` where these are grouped
    key_size: int  # d, the size of a query or key head
    value_size: int  # the size of a value head
    window: int | None = None  # maximum number of keys that a token attends to, itself included; None for all

    def __post_init__(self) -> None:
        names = ["layers", "heads", "kv_heads", "key_size", "value_size"]
        check_numbers("attention", self, names if self.window is None else [*names, "window"])
        if self.heads % self.kv_heads:
            raise shape_error(f"{self.heads} query heads are not a multiple of {self.kv_heads} key-value heads")

    @property
    def cached_values(self) -> int:
        """Numbers that one token adds to the cache, over all layers."""
        return self.layers * self.kv_heads * (self.key_size + self.value_size)

    def seen(self, cached: int) -> int:
        """Of so many cached tokens those that a new one attends to; engines keep no others."""
        return cached if self.window is None else min(cached, self.window - 1)


@dataclass(frozen=True)
class ModelShape:
    """What the time of a decode step depends on.

    Args:
        name: of the model.
        hidden: h, width of the hidden states.
        matrices: of the layers, without the LM head.
        attention: the attention layers, one entry a kind.
        lm_head: from hidden states to the vocabulary.
        tied: whether the LM head is the embedding; its weights are then counted once.
        other: parameters in no matrix: embeddings, norms and biases.
        context: maximum number of tokens; None where the model states none.
        source: where the numbers are from.

    Raises:
        TreeoptError: E240 where there are no matrices or no attention, or a number is below its minimum.
    """

    name: str
    hidden: int
    matrices: tuple[Matrix, ...]
    attention: tuple[Attention, ...]
    lm_head: Matrix
    tied: bool
    other: int
    context: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        check_numbers(self.name, self, ("hidden",) if self.context is None else ("hidden", "context"))
        if not self.matrices or not self.attention:
            raise shape_error(f"{self.name} has no {'attention' if self.matrices else 'matrices'}")
        check_numbers(self.name, self, ("other",), least=0)

    @property
    def layers(self) -> int:
        """Attention layers."""
        return sum(one.layers for one in self.attention)

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        head = 0 if self.tied else self.lm_head.parameters
        return sum(matrix.parameters for matrix in self.matrices) + head + self.other

    @property
    def cached_values(self) -> int:
        """Numbers that one token adds to the key-value cache."""
        return sum(one.cached_values for one in self.attention)


@dataclass(frozen=True)
class Drafting:
    """The computation of drafting: what a step of more than one node adds.

    Args:
        heads: H, Medusa heads; each runs at the one position whose token was accepted last.
        blocks: residual blocks of a head, h x h each.
        head_rows: rows of each head's LM head; None where the heads share that of the base.
        draft: shape of a draft model; None without.
        levels: L, forwards of the draft model in a step, one for each level of the tree.
        host_seconds: seconds of drafting that the accelerator waits for.

    Raises:
        TreeoptError: E240 for numbers below 0 or too large, and a draft model without levels.
    """

    heads: int = 0
    blocks: int = 1
    head_rows: int | None = None
    draft: ModelShape | None = None
    levels: int = 0
    host_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_numbers("drafting", self, ("heads", "blocks", "levels"), least=0)
        if self.head_rows is not None:
            check_numbers("drafting", self, ("head_rows",))
        if not 0.0 <= self.host_seconds <= MOST_SECONDS:
            what = f"drafting: host_seconds {self.host_seconds!r} is not a number from 0 to {MOST_SECONDS:g}"
            raise shape_error(what, fix="--host-seconds 0.001")
        if (self.draft is None) != (self.levels == 0):
            raise shape_error("drafting: a draft model and its levels belong together")

    def __str__(self) -> str:
        parts = []
        if self.heads:
            lm_head = "LM heads of their own" if self.head_rows else "the base's LM head"
            parts.append(f"{counted(self.heads, 'head')} with {lm_head}")
        if self.draft is not None:
            parts.append(f"draft model {self.draft.name}, {counted(self.levels, 'level')}")
        return f"{', '.join(parts) or 'none'}, {self.host_seconds:g} host seconds"


def check_numbers(name: str, record: object, fields: Iterable[str], *, least: int = 1) -> None:
    """Raise E240 where a field is not a whole number from `least` to `MOST`."""
    for field in fields:
        value = getattr(record, field)
        if type(value) is not int or not least <= value <= MOST:
            raise shape_error(f"{name}: {field} {value!r} is not a whole number from {least} to {MOST:,}")


def shape_error(what: str, **parts: str) -> TreeoptError:
    """E240: a model, device or setting that the hardware model cannot use."""
    return TreeoptError(Code.PLAN_INVALID, what, **parts)


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Up to four known names that a wrong one may mean: those that contain it, else those spelled alike."""
    names, text = list(known), name.lower()
    found = [one for one in names if text and text in one] or difflib.get_close_matches(text, names, n=4, cutoff=0.5)
    return found[:4]
