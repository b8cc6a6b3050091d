"""The acceptance rule inside stock `generate`: its logits processors are applied to the path of every node."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from treeopt.decode.decoder import Rows
from treeopt.decode.rules import Rule, best, draw
from treeopt.drafting.interface import Drafts
from treeopt.errors import Code, TreeoptError

_FIX = "leave out custom_generate for this call"
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
# Processors that store the texts of earlier calls, and would store drafts that are rejected later.
_STATEFUL = (stock.UnbatchedClassifierFreeGuidanceLogitsProcessor, stock.SynthIDTextWatermarkLogitsProcessor)


def check_processors(processors: Iterable[Any], stateless: bool | Sequence[type]) -> None:
    """Raise E510 for a processor whose result may depend on its earlier calls.

    Those of transformers depend on the text alone, with two exceptions; others where the user says so by `stateless`.
    """
    declared = (object,) if stateless is True else tuple(stateless or ())
    for one in processors:
        of_transformers = type(one).__module__.split(".")[0] == "transformers"
        if isinstance(one, _STATEFUL) or not (of_transformers or isinstance(one, declared)):
            name = type(one).__name__
            more = f"; stateless_processors=True, or [{name}], says that its result depends on the text alone"
            raise TreeoptError(
                Code.GENERATE_UNSUPPORTED,
                f"the logits processor {name} may depend on its earlier calls",
                why="a tree also calls it with the paths of drafts that are rejected later",
                fix=_FIX + ("" if of_transformers else more),
            )


class Processed(Rule):
    """The choice of stock `generate` after every node: its processors are called with the node's path.

    Prompts int64 [B, T] are padded on the left.
    """

    rows: Rows  # of the next calls; set after the prompts

    def __init__(self, processors: LogitsProcessorList, prompts: Tensor, *, sample: bool) -> None:
        self.texts: list[list[int]] = prompts.tolist()  # of each row: padding, prompt and emitted tokens
        self._prompts, self._processors, self._sample = prompts, processors, sample

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        scores = logits.float()
        if self._processors:
            scores = self._process(scores.clone(), drafts)
        return draw(scores, generator) if self._sample else best(scores)

    def _process(self, scores: Tensor, drafts: Drafts | None) -> Tensor:
        if drafts is None or all(type(one) in _TEXT_FREE for one in self._processors):
            rows = scores.flatten(0, -2)
            ids = self._prompts if drafts is None else self._prompts.new_zeros(len(rows), 0)
            processed: Tensor = self._processors(ids, rows)
            return processed.view_as(scores)
        depths, paths = drafts.tree.position_ids, drafts.tree.paths
        if not drafts.tree.per_row:
            depths, paths = depths.expand(len(scores), -1), paths.expand(len(scores), -1, -1)
        for row, index in enumerate(self.rows.indices):
            self._process_row(index, scores[row], drafts.tokens[row], depths[row].tolist(), paths[row])
        return scores

    def _process_row(self, index: int, scores: Tensor, tokens: Tensor, depths: list[int], paths: Tensor) -> None:
        """Process the scores [N, V] of one row in place."""
        text = torch.tensor(self.texts[index], device=tokens.device)
        processors, copies = self._of_row(index), len(self._prompts)
        for depth in range(depths[-1] + 1):  # the texts of one depth have equal lengths, so one call takes them all
            nodes = [node for node, at in enumerate(depths) if at == depth]
            ids = torch.cat([text.expand(len(nodes), -1), tokens[paths[nodes, : depth + 1]]], dim=1)
            if processors:
                scores[nodes] = processors(ids, scores[nodes])
                continue
            for node, line in zip(nodes, ids, strict=True):  # the result may depend on the row, so it is in each
                scores[node] = self._processors(line.expand(copies, -1), scores[node].repeat(copies, 1))[index]

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
