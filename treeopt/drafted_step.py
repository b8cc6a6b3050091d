"""The record of one decoding step: the tree as it was drafted, its tokens, and what of it was accepted."""

from dataclasses import dataclass

from treeopt.tree import ROOT, Tree


@dataclass(frozen=True)
class DraftedStep:
    """One step of one text, whose tree has N nodes; of a per-step tree the ranks are the order of siblings.

    ValueError where a list has another length, or the accepted nodes are no path from the root.
    """

    tree: Tree
    tokens: tuple[int | None, ...]  # [N], the token of each node; None for a node without a draft
    texts: tuple[str, ...]  # [N], the text that each token adds to its path; empty for a node without a draft
    probabilities: tuple[float | None, ...]  # [N], by the base, after the parent's path; None as above and for the root
    accepted: tuple[int, ...]  # the nodes from the root to the last accepted draft
    bonus: int | None = None  # the base's token after them, the next root; None where the text ends before
    bonus_text: str = ""  # the text that it adds
    number: int = 1  # of the step, from 1
    prompt: str = ""  # the text that is continued

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.texts), len(self.probabilities)}
        if lengths != {self.tree.nodes}:
            what = f"tokens, texts and probabilities of {sorted(lengths)} nodes; the tree has {self.tree.nodes}"
            raise ValueError(what)
        if self.accepted[:1] != (ROOT,) or any(
            not above < node < self.tree.nodes or self.tree.parents[node] != above or self.tokens[node] is None
            for above, node in zip(self.accepted, self.accepted[1:], strict=False)
        ):
            raise ValueError(f"accepted nodes {self.accepted}: not a path of drafts from the root")

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        """The tokens that the step emits: the root and the accepted drafts."""
        return tuple(token for node in self.accepted if (token := self.tokens[node]) is not None)
