"""The acceptance rule inside stock `generate`: its logits processors are applied to the path of every node."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, PreTrainedTokenizerBase
from transformers.generation import logits_process as stock

from treeopt.decode.decoder import Rows
from treeopt.decode.rules import Exact, best, draw
from treeopt.drafting.interface import Drafts
from treeopt.errors import Code, TreeoptError

_STOCK = "transformers."  # prefix of its modules; its processors with a state are refused by name in `generate`
_COMPARED = 1 << 16  # largest number of values of a CPU tensor that is compared; else its version counter
_CONSTANT = (nn.Module, PreTrainedTokenizerBase, type, ModuleType)  # not changed by processors
_FIX = "tree=treeopt.Tree(()) decodes with one node; stateless_processors=True, or [{name}], says that it has no state"


def watched(processors: Iterable[Any], stateless: bool | Sequence[type]) -> list[Any]:
    """The processors that run code from outside transformers and are not declared stateless."""
    if stateless is True:
        return []
    declared = tuple(stateless or ())
    # This stock processor calls a function that the user passes, such as a grammar's.
    others = [one for one in processors if isinstance(one, PrefixConstrainedLogitsProcessor) or not _is_stock(one)]
    return [one for one in others if not (declared and isinstance(one, declared))]


def _is_stock(processor: Any) -> bool:
    return (type(processor).__module__ + ".").startswith(_STOCK)


class Watch:
    """The state of some processors when this object was made.

    Raises:
        TreeoptError: E510 where a state cannot be read.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self._processors = processors
        self._before = [_State(one) for one in processors]

    def check(self) -> None:
        """Raise E510 where a processor has changed since then."""
        for one, before in zip(self._processors, self._before, strict=True):
            if _State(one).text != before.text:
                what = f"the logits processor {type(one).__name__} changes its own state when it is called"
                why = "a tree calls it with the paths of drafts that are rejected later"
                raise _refused(one, what, why)


class _State(pickle.Pickler):
    """The state of an object as bytes, which are equal where nothing has changed; they are never unpickled.

    Attributes:
        text: the bytes.
    """

    def __init__(self, processor: Any) -> None:
        self._alive: list[Any] = []  # objects identified by their address, which must not be freed
        stream = io.BytesIO()
        super().__init__(stream, protocol=4)
        try:
            self.dump(processor)
        except Exception as error:  # foreign objects raise any type
            what = f"the state of the logits processor {type(processor).__name__} cannot be read: {error}"
            raise _refused(processor, what, "a tree would call it with drafts that are rejected later") from error
        self.text = stream.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        """A replacement for tensors and for objects that do not change; None for everything else."""
        if isinstance(obj, _CONSTANT):
            return self._place(obj)
        if isinstance(obj, Tensor):
            if obj.is_inference() or (obj.device.type == "cpu" and obj.numel() <= _COMPARED):
                return str(obj.dtype), tuple(obj.shape), _bytes(obj)
            return (*self._place(obj), obj._version)
        if isinstance(obj, torch.Generator):
            return "generator", _bytes(obj.get_state())
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Functions by their closures and defaults; other objects as they pickle themselves."""
        if isinstance(obj, FunctionType) and obj is not _parts:
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return _parts, (self._place(obj.__code__), cells, obj.__defaults__)
        if isinstance(obj, MethodType):
            return _parts, (obj.__func__, obj.__self__)
        return NotImplemented

    def _place(self, obj: Any) -> tuple[str, int]:
        self._alive.append(obj)
        return type(obj).__name__, id(obj)


def _bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any type."""
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _parts(*parts: Any) -> tuple[Any, ...]:
    """The parts of a function in a state."""
    return parts


def _refused(processor: Any, what: str, why: str) -> TreeoptError:
    fix = _FIX.format(name=type(processor).__name__)
    return TreeoptError(Code.GENERATE_UNSUPPORTED, what, why=why, fix=fix)


# Processors that depend on the scores alone, not on the text; all nodes are processed in one call.
_TEXT_FREE = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.SuppressTokensLogitsProcessor,
)
# Processors whose result depends on the row of the batch.
_BY_ROW = (
    stock.PrefixConstrainedLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
)


SameDepth = tuple[list[int], Tensor]  # n nodes of one depth, and their paths int64 [n, depth + 1]


class Processed(Exact):
    """The choice of stock `generate` after every node: its processors are called with the node's path.

    Where trees have one node, processors are called as by `generate`: once for each token, with all rows of the batch.

    Args:
        processors: as `generate` made them.
        prompts: int64 [B, T], padded on the left.
        sample: whether tokens are drawn.
        pad: token id of rows that have ended.
        stateless: as `tree_generate`.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        prompts: Tensor,
        *,
        sample: bool,
        pad: int = 0,
        stateless: bool | Sequence[type] = False,
    ) -> None:
        self.texts: list[list[int]] = prompts.tolist()  # of each row: padding, prompt and emitted tokens
        self._prompts = prompts
        self._processors = processors
        self._sample = sample
        self._pad = pad
        self._stateless = stateless
        self._watch = Watch(())
        self._one_node = False
        self._chosen: dict[int, int] = {}  # for trees of one node: the last chosen token of each row

    def verify_trees(self, nodes: int) -> None:
        """Set how many nodes the trees have; with more than one, processors must have no state.

        Raises:
            TreeoptError: E510 where the state of a processor cannot be read; `choose` raises it where the state
                changes in a call.
        """
        self._one_node = nodes == 1
        if not self._one_node:
            self._watch = Watch(watched(self._processors, self._stateless))

    def follow(self, rows: Rows, ends: Collection[int]) -> None:
        """Set the rows of the next calls, and the tokens that end a text."""
        self._rows = rows
        self._ends = ends

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        scores = logits.float()
        if self._processors:
            scores = self._process(scores.clone(), drafts)
            self._watch.check()
        choice = draw(scores, generator) if self._sample else best(scores)
        if self._one_node and self._processors:
            rows = range(len(choice)) if drafts is None else self._rows.indices
            self._chosen = dict(zip(rows, choice.flatten().tolist(), strict=True))
        return choice

    def _process(self, scores: Tensor, drafts: Drafts | None) -> Tensor:
        if drafts is None:
            processed: Tensor = self._processors(self._prompts, scores)
            return processed
        if self._one_node:
            return self._process_batch(scores, drafts.tokens)
        if all(type(one) in _TEXT_FREE for one in self._processors):
            flat = scores.flatten(0, 1)
            processed = self._processors(self._prompts.new_zeros(len(flat), 0), flat)
            return processed.view_as(scores)
        depths, paths = drafts.tree.position_ids, drafts.tree.paths
        if not drafts.tree.per_row:
            depths, paths = depths.expand(len(scores), -1), paths.expand(len(scores), -1, -1)
        for row, index in enumerate(self._rows.indices):
            self._process_row(index, scores[row], drafts.tokens[row], _by_depth(depths[row], paths[row]))
        return scores

    def _process_row(self, index: int, scores: Tensor, tokens: Tensor, levels: list[SameDepth]) -> None:
        """Process the scores [N, V] of one row in place."""
        text = torch.tensor(self.texts[index], device=tokens.device)
        processors = self._of_row(index)
        # The texts of the nodes of one depth have equal lengths, so stock processors process them in one call.
        for nodes, paths in levels if processors else _one_node_each(levels):
            ids = torch.cat([text.expand(len(nodes), -1), tokens[paths]], dim=1)
            if processors:
                scores[nodes] = processors(ids, scores[nodes])
            else:  # the result may depend on the row, so the node is passed in each row of the batch
                copies = len(self._prompts)
                out = self._processors(ids.expand(copies, -1), scores[nodes].repeat(copies, 1))
                scores[nodes] = out[index]

    def _process_batch(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """One call for all rows of the batch, including ended ones: scores [B, 1, V] and tokens [B, 1] of the others.

        As in `generate`, the text of an ended row contains the end token once, followed by padding.
        """
        texts = [list(text) for text in self.texts]
        for index, token in zip(self._rows.indices, tokens[:, 0].tolist(), strict=True):
            texts[index].append(token)
        for index, token in self._chosen.items():
            if index not in self._rows.indices and token in self._ends:
                texts[index].append(token)
        longest = max(map(len, texts))
        ids = torch.tensor([text + [self._pad] * (longest - len(text)) for text in texts], device=tokens.device)
        whole = scores.new_zeros(len(texts), scores.shape[-1])
        whole[self._rows.indices] = scores[:, 0]
        processed: Tensor = self._processors(ids, whole)
        return processed[self._rows.indices][:, None]

    def _of_row(self, index: int) -> LogitsProcessorList | None:
        """The processors for any number of continuations of one row; None where their result may depend on the row."""
        found = LogitsProcessorList()
        for one in self._processors:
            if type(one).__module__ != stock.__name__ or isinstance(one, _BY_ROW):
                return None
            ignored = getattr(one, "prompt_ignore_length", None)
            if isinstance(one, stock.RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
                one = stock.RepetitionPenaltyLogitsProcessor(one.penalty, int(ignored[index]))
            found.append(one)
        return found


def _by_depth(depths: Tensor, paths: Tensor) -> list[SameDepth]:
    """The nodes of one tree by depth: depths [N], paths [N, D+1]."""
    known = depths.tolist()
    levels = []
    for depth in range(known[-1] + 1):
        nodes = [node for node, at in enumerate(known) if at == depth]
        levels.append((nodes, paths[nodes, : depth + 1]))
    return levels


def _one_node_each(levels: Sequence[SameDepth]) -> list[SameDepth]:
    """The same nodes, one at a time."""
    return [([node], paths[i : i + 1]) for nodes, paths in levels for i, node in enumerate(nodes)]
