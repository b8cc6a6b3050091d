"""Advice: where a validation's own figures say that this tree, or this way of running it, does not pay."""

from __future__ import annotations

from treeopt.evaluate.metrics import GENERATE, LOOKUP, TREE
from treeopt.evaluate.validation import Validation


def advice(found: Validation) -> tuple[str, ...]:
    """Warnings, of a line or more each; none where the tree is the fastest way and nothing known slows it down."""
    return tuple(text for text in (_losing(found), _beaten(found), _slow_attention(found)) if text)


def _losing(found: Validation) -> str:
    """A step costs more one-token steps than it yields tokens."""
    if found.speedup is None or found.overhead is None or found.speedup >= 1:
        return ""
    batch = f" (batch {found.batch_size})" if found.batch_size > 1 else ""
    text = (
        f"the tree loses{batch}: a step of {found.nodes} nodes costs {found.overhead:.2f} one-token steps and yields "
        f"{found.tokens_per_step:.2f} tokens\n"
    )
    if found.smaller:
        sizes = ", ".join(f"{nodes} nodes {tau:.2f}" for nodes, tau in found.smaller.items())
        text += f"  a size pays where it yields more than it costs; with the most used nodes alone it yields: {sizes}\n"
    if found.batch_size > 1:
        text += "  a batch fills the machine with its own rows, so that drafts cost more than at batch 1\n"
    return text + "  treeopt profile measures what each size costs here, treeopt build --nodes auto takes the best"


def _beaten(found: Validation) -> str:
    """What comes with transformers is faster."""
    rates = {way: found.figures.tokens_per_second(way) for way in found.figures.ways}
    tree = rates[TREE]
    names = {GENERATE: "stock generate", LOOKUP: "prompt lookup, which needs no heads,"}
    faster = [name for way, name in names.items() if tree and (rate := rates.get(way)) and rate.median > tree.median]
    return f"{' and '.join(faster)} decoded these texts faster than the tree" if faster else ""


def _slow_attention(found: Validation) -> str:
    """bfloat16 through sdpa on a CPU, which has no fast path for a few queries."""
    if (found.made_by["device"], found.made_by["dtype"], found.made_by["attention"]) != ("cpu", "bfloat16", "sdpa"):
        return ""
    return (
        "bfloat16 with sdpa attention on a CPU takes several times as long as eager attention over few tokens: load "
        'the model with attn_implementation="eager"'
    )
