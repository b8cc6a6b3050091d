"""The probe: a check that a model can verify trees, by a small tree compared with its paths run separately.

Some models accept a tree mask and give other results (positions from the cache index, recurrent state, local layers),
and their config does not show it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.models.base import Base
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree
from treeopt.verify.masks import index_window
from treeopt.verify.session import TreeForward

_TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
_PREFIX = 12
# Largest difference of logits, as a share of their spread: above rounding, far below any wrong mask or position.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION = 0.1

Setting = tuple[torch.dtype, torch.device, str]  # dtype, device and attention: the result of the probe depends on them
_passed: weakref.WeakKeyDictionary[PreTrainedModel, Setting] = weakref.WeakKeyDictionary()  # by model


def check_trees(base: Base) -> None:
    """Raise E502 unless every node of a small tree has the logits of its path run separately.

    A model that has passed is not run again while its dtype, device and attention are the same.
    """
    if getattr(base.model, "_is_stateful", False):
        raise _refused(base, "its layers have a state that cannot be rewound")
    check_ready(base)
    setting = (base.dtype, base.device, base.model.config._attn_implementation)
    if _passed.get(base.model) != setting:
        _run(base)
        _passed[base.model] = setting


def check_ready(base: Base) -> None:
    """Raise E502 where a forward of the model is not that of its text: in training mode, or with a soft prompt."""
    if base.model.training:
        what = f"{base.name} is in training mode"
        why = "dropout changes the result of every forward"
        raise TreeoptError(Code.NO_TREES, what, why=why, fix="call model.eval() first")
    if kind := soft_prompt(base.model):
        raise TreeoptError(
            Code.NO_TREES,
            f"{base.name} has an adapter of peft's kind {kind}",
            why="it puts virtual tokens before every text, and a tree is verified after token ids alone",
            fix="decode with stock generate; adapters in the weights, such as LoRA, work",
        )


def soft_prompt(model: nn.Module) -> str:
    """The kind of a peft adapter that puts virtual tokens before every text, such as PREFIX_TUNING; empty without one.

    Within peft's `generate`, `prepare_inputs_for_generation` of the base is the adapter's, which adds them.
    """
    owner = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    config: Any = getattr(owner, "active_peft_config", None)
    return str(config.peft_type.value) if getattr(config, "is_prompt_learning", False) else ""


@torch.inference_mode()
def _run(base: Base) -> None:
    forward = TreeForward(base, _TREE.nodes, _TREE.depth)
    length = min(_PREFIX, forward.context - _TREE.nodes)
    if length < 1:
        if (window := index_window(base.model.config)) is not None and window < base.context:
            raise _refused(base, f"its window of {window} tokens is too short for a tree, which needs masks by layer")
        raise _refused(base, f"its context of {base.context} tokens is too short for a tree")
    tokens = (torch.arange(length + _TREE.nodes, device=base.device) * 7 + 3) % base.vocab_size
    prefix, nodes = tokens[:length], tokens[length:]
    try:
        session, _, _ = forward.begin([prefix], _TREE.nodes)
        logits = session.verify(nodes[None], compile_tree(_TREE, base.device))[0][0]
        alone = _paths_alone(base, prefix, nodes)
    except TreeoptError:
        raise
    except Exception as error:  # models raise any type
        raise _refused(base, f"its forward failed on a tree: {first_line(error)}") from error
    base.check_finite(alone)
    spread = (alone.float() - alone.float().mean(-1, keepdim=True)).abs().max()
    difference = (logits.float() - alone.float()).abs().max() / spread.clamp_min(1e-12)
    if not difference <= _TOLERANCE.get(base.dtype, _LOW_PRECISION):
        raise _refused(base, f"a tree's logits differ from its paths' by {difference:.2g} of their spread")


def _paths_alone(base: Base, prefix: Tensor, nodes: Tensor) -> Tensor:
    """Logits [N, V] of each node, by a forward without a tree mask over the prefix and the node's path."""
    rows = []
    for ancestors in torch.tensor(_TREE.ancestors, device=base.device):
        ids = torch.cat([prefix, nodes[ancestors]])
        positions = torch.arange(len(ids), device=base.device)[None]  # as in stock `generate`
        rows.append(base.forward(ids[None], position_ids=positions, use_cache=False)[0][0, -1])
    return torch.stack(rows)


def _refused(base: Base, why: str) -> TreeoptError:
    kind = base.model.config.model_type
    return TreeoptError(Code.NO_TREES, f"{base.name} ({kind}) cannot verify trees", why=why)
