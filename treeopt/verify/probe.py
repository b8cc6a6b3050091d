"""The probe: which route a model's trees take, by small trees whose logits are compared with those of plain forwards.

Some models accept a tree mask and give other results (positions from the cache index, recurrent state, local layers),
some lose their state in chunks of several tokens, and their config does not show it. Nothing goes by names.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.models.base import Base
from treeopt.tree import ROOT, Tree
from treeopt.verify.buffers import PAD, Buffers, compile_tree
from treeopt.verify.levels import LevelSession, StateLevels
from treeopt.verify.masks import index_window
from treeopt.verify.paths import PathForward, Ways, rows_of
from treeopt.verify.session import TreeForward

_TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
_SMALL = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])  # of nodes 1 to 5
_PREFIX = 12
_PAIR = (12, 5)  # lengths of the texts of the probe of paths
_STEPS = 16  # tokens that its steps may append
_SINGLE = 6  # tokens that are run one by one
# Largest difference of logits, as a share of their spread: above rounding, far below any wrong mask or position.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOW_PRECISION = 0.1
_ONE_BY_ONE = 1e-2  # of single tokens from chunks, in float32: a few models round them in other ways, none by more
_WAYS = (Ways(True, True), Ways(True, False), Ways(False, True), Ways(False, False), Ways(False, False, masked=False))

Setting = tuple[torch.dtype, torch.device, str]  # dtype, device and attention: the result of the probe depends on them


@dataclass(frozen=True)
class Route:
    """How a model verifies trees: `kind` is "tree", one row with a tree mask, or "paths", with their `ways`.

    `rounding` is how much single tokens differ from chunks, which paths are: near ties may fall otherwise.
    """

    kind: str
    ways: Ways | None = None
    rounding: float = 0.0
    reason: str = ""  # why it is not "tree"


_routes: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Setting, Route]] = weakref.WeakKeyDictionary()  # by model


def check_trees(base: Base) -> None:
    """Raise E502 unless the model verifies trees exactly on one of the routes."""
    probed(base)


def route_of(base: Base) -> str:
    """The route of the model's trees, "tree" or "paths"; E502 where there is none."""
    return probed(base).kind


def verifies_paths(base: Base) -> bool:
    """Whether the model's trees are verified as paths; not where it has no route."""
    try:
        return route_of(base) == "paths"
    except TreeoptError as error:
        if error.code is not Code.NO_TREES:
            raise
        return False


def probed(base: Base) -> Route:
    """The route of the model's trees: "tree" where that is exact, else "paths". E502 where neither is.

    A model that has passed is not run again while its dtype, device and attention are the same.
    """
    check_ready(base)
    setting = (base.dtype, base.device, base.model.config._attn_implementation)
    known = _routes.get(base.model)
    if known is None or known[0] != setting:
        known = _routes[base.model] = setting, _probe(base)
    return known[1]


def same_route(base: Base, other: Base) -> None:
    """Take the route of another model whose layers are the same, instead of a probe."""
    if base.model is not other.model:
        probed(other)
        _routes[base.model] = _routes[other.model]


def forward_of(
    base: Base, nodes: int, depth: int, *, compile: bool = False, probe: bool = True
) -> TreeForward | PathForward:
    """The forward of a model's trees, of at most so many nodes and levels.

    Without `probe` its route is that of an earlier probe, or else "tree". E502 where the model has no route, and where
    the forward is to be compiled and its route is "paths".
    """
    route = probed(base) if probe or base.model in _routes else None
    if route is None or route.ways is None:
        return TreeForward(base, nodes, depth, compile=compile)
    if compile:
        what = f"{base.name} ({base.model.config.model_type}) verifies trees as paths, whose forward is not compiled"
        why = "the shapes of a batch of paths differ from step to step"
        raise TreeoptError(Code.NO_TREES, what, why=why, fix="leave out --compile")
    return PathForward(base, nodes, depth, route.ways)


def levels_of(base: Base, rows: int) -> LevelSession | StateLevels:
    """Texts in progress on a draft model, by its route."""
    ways = probed(base).ways
    return LevelSession(base, rows) if ways is None else StateLevels(base, rows, ways)


def check_ready(base: Base) -> None:
    """Raise E502 where a forward of the model is not that of its text: in training mode, or with such an adapter."""
    if base.model.training:
        what = f"{base.name} is in training mode"
        why = "dropout changes the result of every forward"
        raise TreeoptError(Code.NO_TREES, what, why=why, fix="call model.eval() first")
    if kind := refused_adapter(base.model):
        why = "it depends on the place or the row of a token, and a tree is verified after token ids alone"
        fix = "decode with stock generate; adapters in the weights, such as LoRA, work"
        raise TreeoptError(Code.NO_TREES, f"{base.name} has an adapter of peft's kind {kind}", why=why, fix=fix)


def refused_adapter(model: nn.Module) -> str:
    """The kind of a peft adapter that is not the same for all tokens of a forward; empty without one.

    It puts virtual tokens before every text (PREFIX_TUNING), or acts from an invocation on (aLoRA) or on some rows.
    Within peft's `generate`, `prepare_inputs_for_generation` of the base is the adapter's.
    """
    owner = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    config: Any = getattr(owner, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        return str(config.peft_type.value)
    parts = model.modules() if hasattr(model, "peft_config") else ()
    given = {
        name for part in parts for hook in part._forward_pre_hooks.values() for name in getattr(hook, "keywords", ())
    }
    alora = getattr(config, "alora_invocation_tokens", None) or "alora_offsets" in given
    return "aLoRA" if alora else "adapter_names" if "adapter_names" in given else ""


@torch.inference_mode()
def _probe(base: Base) -> Route:
    try:
        _try_tree(base)
        return Route("tree")
    except TreeoptError as error:
        if error.code is not Code.NO_TREES:
            raise
        tree = error.why or error.what
    paths = ""
    for ways in _WAYS:
        try:
            chunks, singles, rounding = _try_paths(base, ways)
        except TreeoptError:
            raise
        except Exception as error:  # models raise any type
            if not ways.crop:
                paths = f"its forward failed on a batch of paths: {first_line(error)}"
            continue
        by_ones = _ONE_BY_ONE if base.dtype in _TOLERANCE else _LOW_PRECISION
        if rounding > by_ones:
            paths = f"its logits after single tokens differ from those after chunks by {rounding:.2g} of their spread"
        elif chunks <= _TOLERANCE.get(base.dtype, _LOW_PRECISION) and singles <= by_ones:
            return Route("paths", ways, rounding, tree)
        elif not ways.crop:
            most = max(chunks, singles)
            paths = f"the logits of paths after a cache differ from those without by {most:.2g} of their spread"
    raise _refused(base, f"as a tree: {tree}; as paths: {paths}")


def _try_tree(base: Base) -> None:
    forward = TreeForward(base, _TREE.nodes, _TREE.depth)
    length = min(_PREFIX, forward.context - _TREE.nodes)
    if length < 1:
        if (window := index_window(base.model.config)) is not None and window < base.context:
            raise _refused(base, f"its window of {window} tokens is too short for a tree, which needs masks by layer")
        raise _refused(base, f"its context of {base.context} tokens is too short for a tree")
    tokens = _tokens(base, length + _TREE.nodes)
    prefix, nodes = tokens[:length], tokens[length:]
    tree = compile_tree(_TREE, base.device)
    try:
        session, _, _ = forward.begin([prefix], _TREE.nodes)
        logits = session.verify(nodes[None], tree)[0][0]
        alone = _paths_alone(base, prefix, nodes, tree)
    except TreeoptError:
        raise
    except Exception as error:  # models raise any type
        raise _refused(base, f"its forward failed on a tree: {first_line(error)}") from error
    base.check_finite(alone)
    difference = _difference(logits, alone)
    if not difference <= _TOLERANCE.get(base.dtype, _LOW_PRECISION):
        raise _refused(base, f"a tree's logits differ from its paths' by {difference:.2g} of their spread")


def _try_paths(base: Base, ways: Ways) -> tuple[float, float, float]:
    """Differences of logits: of nodes after replay and commit, after single tokens and selection, of tokens one by one.

    Two texts of different lengths decode several steps: a tree on their states; one after accepted tokens that are
    replayed; one after their commit; one after a row that is a text's new state; single nodes; then one text alone.
    """
    lengths = [min(length, base.context - _STEPS) for length in _PAIR]
    if min(lengths) < 1:
        raise _refused(base, f"its context of {base.context} tokens is too short for trees as paths")
    tokens = _tokens(base, 256)
    forward = PathForward(base, _SMALL.nodes, _SMALL.depth, ways, fixed=math.inf)
    prompts = [tokens[:length] for length in lengths]
    session, _, _ = forward.begin(prompts, _STEPS)
    tree, one = compile_tree(_SMALL, base.device), compile_tree(Tree(()), base.device)
    numbers = iter(range(20, 256, 2 * _SMALL.nodes))  # of the first tokens of the steps

    def step(buffers: Buffers, *kept: list[int]) -> float:
        first, count, found = next(numbers), buffers.nodes, []
        nodes = tokens[first : first + len(prompts) * count].reshape(len(prompts), count)
        logits, _ = session.verify(nodes, buffers)
        for row, prompt in enumerate(prompts):
            found.append(_difference(logits[row], _paths_alone(base, prompt, nodes[row], buffers)))
        session.keep(kept)
        prompts[:] = [torch.cat([prompt, nodes[row, kept[row]]]) for row, prompt in enumerate(prompts)]
        return max(found)

    chunks = [step(tree, [0, 1], [0, 1, 4])]  # an inner node, and a leaf that is not the deepest
    forward.fixed = 0.0
    chunks += [step(tree, [0, 1], [0]), step(tree, [0, 2], [0, 1, 3, 5]), step(tree, [0, 2], [0, 1])]
    singles = [step(one, [0], [0])]  # RWKV confuses rows of one token
    session.select([1])
    del prompts[0]
    singles += [step(tree, [0]), step(one, [0]), step(one, [0])]
    return max(chunks), max(singles), _one_by_one(forward, prompts[0])


def _one_by_one(forward: PathForward, text: Tensor) -> float:
    """How much the logits of the last tokens of a text differ where they are run one by one, as in stock `generate`."""
    base = forward.base
    session, _, _ = PathForward(base, 1, 0, forward.ways).begin([text[:-_SINGLE]], _SINGLE)
    one = compile_tree(Tree(()), base.device)
    logits = []
    for token in text[-_SINGLE:]:
        logits.append(session.verify(token[None, None], one)[0][0])
        session.keep([[ROOT]])
    return _difference(torch.cat(logits), _logits(base, text)[-_SINGLE:])


def _difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the spread."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).abs().max()
    difference = float((logits.float() - expected).abs().max() / spread.clamp_min(1e-12))
    return difference if math.isfinite(difference) else math.inf


def _logits(base: Base, ids: Tensor) -> Tensor:
    """Logits [n, V] of a forward over a text, as in stock `generate`: with its mask and positions."""
    positions = torch.arange(len(ids), device=base.device)[None]
    mask = torch.ones_like(ids[None])
    return base.forward(ids[None], attention_mask=mask, position_ids=positions, use_cache=False)[0][0]


def _paths_alone(base: Base, prefix: Tensor, nodes: Tensor, tree: Buffers) -> Tensor:
    """Logits [N, V] of each node, by forwards without cache and tree mask over the prefix and each path."""
    rows = rows_of(tree.paths.numpy(force=True))
    paths = [torch.from_numpy(path[path != PAD]).to(nodes.device) for path in rows.nodes]
    logits = [_logits(base, torch.cat([prefix, nodes[path]]))[len(prefix) :] for path in paths]
    return torch.stack([logits[row][depth] for row, depth in zip(rows.row, rows.depth, strict=True)])


def _tokens(base: Base, count: int) -> Tensor:
    return (torch.arange(count, device=base.device) * 7 + 3) % base.vocab_size


def _refused(base: Base, why: str) -> TreeoptError:
    return TreeoptError(Code.NO_TREES, f"{base.name} ({base.model.config.model_type}) cannot verify trees", why=why)
