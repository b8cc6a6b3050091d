"""The record of one decoding step: the tree as it was drafted, its tokens, and what of it was accepted."""

from __future__ import annotations

from dataclasses import dataclass

from treeopt.tree import ROOT, Tree


@dataclass(frozen=True)
class DraftedStep:
    """One step of one text.

    Args:
        tree: the tree of the step, N nodes. Of a per-step tree the ranks are the order of siblings, without values.
        tokens: [N], the token of each node; None for a node without a draft.
        texts: [N], the text that each token adds to its path; empty for a node without a draft.
        probabilities: [N], the probability that the base model gives each token after the path of its parent; None for
            the root, which was chosen by the step before, and for a node without a draft.
        accepted: the nodes from the root to the last accepted draft.
        bonus: the base model's token after the accepted path, which is the root of the next step; None where the text
            ends on the accepted path.
        bonus_text: the text that it adds; empty where there is none.
        number: of the step, from 1.
        prompt: the text that is continued.

    Raises:
        ValueError: where a list has another length, or the accepted nodes are no path from the root.
    """

    tree: Tree
    tokens: tuple[int | None, ...]
    texts: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    accepted: tuple[int, ...]
    bonus: int | None = None
    bonus_text: str = ""
    number: int = 1
    prompt: str = ""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.texts), len(self.probabilities)}
        if lengths != {self.tree.nodes}:
            raise ValueError(
                f"tokens, texts and probabilities of {sorted(lengths)} nodes; the tree has {self.tree.nodes}"
            )
        if self.accepted[:1] != (ROOT,) or any(
            not above < node < self.tree.nodes or self.tree.parents[node] != above or self.tokens[node] is None
            for above, node in zip(self.accepted, self.accepted[1:], strict=False)
        ):
            raise ValueError(f"accepted nodes {self.accepted}: not a path of drafts from the root")

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        """The tokens that the step emits: the root and the accepted drafts."""
        return tuple(token for node in self.accepted if (token := self.tokens[node]) is not None)
