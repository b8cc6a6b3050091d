"""Advice: warnings where a validation shows that the tree, or the way it is run, is slower than necessary."""

from __future__ import annotations

from treeopt.errors import counted
from treeopt.evaluate.baselines import GENERATE, LOOKUP, TREE
from treeopt.evaluate.validation import Validation


def advice(found: Validation) -> tuple[str, ...]:
    """Warnings, each of one line or more; none where the tree is the fastest and no known cause slows it down."""
    return tuple(text for text in (_slower(found), _slower_than_stock(found), _slow_attention(found)) if text)


def _slower(found: Validation) -> str:
    """A step takes more autoregressive steps of time than it yields tokens."""
    if found.speedup is None or found.overhead is None or found.speedup >= 1:
        return ""
    batch = f" (batch {found.batch_size})" if found.batch_size > 1 else ""
    size = counted(found.nodes, "node")
    text = (
        f"the tree is slower than autoregressive decoding{batch}: a step of {size} takes the time of "
        f"{found.overhead:.2f} autoregressive steps and yields {found.tokens_per_step:.2f} tokens\n"
    )
    if found.smaller:
        sizes = ", ".join(f"{counted(nodes, 'node')} {tau:.2f}" for nodes, tau in found.smaller.items())
        text += f"  the most used part of the tree yields, in tokens per step: {sizes}\n"
    if found.batch_size > 1:
        text += "  in a batch the device has less spare capacity for drafts than at batch 1\n"
    return text + "  treeopt profile measures the cost of each size, treeopt build --nodes auto chooses the best one"


def _slower_than_stock(found: Validation) -> str:
    """Stock generate or prompt lookup is faster."""
    rates = {name: found.metrics.tokens_per_second(name) for name in found.metrics.baselines}
    tree = rates[TREE]
    names = {GENERATE: "stock generate", LOOKUP: "prompt lookup, which needs no drafter,"}
    faster = [text for name, text in names.items() if tree and (rate := rates.get(name)) and rate.median > tree.median]
    return f"{' and '.join(faster)} decoded these texts faster than the tree" if faster else ""


def _slow_attention(found: Validation) -> str:
    """bfloat16 with sdpa on a CPU, which has no fast kernel for a few queries."""
    if (found.made_by["device"], found.made_by["dtype"], found.made_by["attention"]) != ("cpu", "bfloat16", "sdpa"):
        return ""
    return (
        "bfloat16 with sdpa attention on a CPU takes several times as long as eager attention over few tokens: load "
        'the model with attn_implementation="eager"'
    )
