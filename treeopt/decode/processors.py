"""The acceptance rule inside stock `generate`: its logits processors are applied to the path of every node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from treeopt.decode.decoder import Rows
from treeopt.decode.rules import Rule, best, draw
from treeopt.drafting.interface import Drafts
from treeopt.errors import Code, TreeoptError

_FIX = "tree=treeopt.Tree(()) decodes with one node"
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

    With `one_node` trees they are called as by `generate`: once for each token, with all rows of the batch, of which
    those that have ended hold `pad`. Prompts int64 [B, T] are padded on the left.
    """

    def __init__(
        self, processors: LogitsProcessorList, prompts: Tensor, *, sample: bool, pad: int, one_node: bool
    ) -> None:
        self.texts: list[list[int]] = prompts.tolist()  # of each row: padding, prompt and emitted tokens
        self._prompts, self._processors = prompts, processors
        self._sample, self._pad, self._one_node = sample, pad, one_node
        self._chosen: dict[int, int] = {}  # for trees of one node: the last chosen token of each row

    def follow(self, rows: Rows, ends: Collection[int]) -> None:
        """Set the rows of the next calls, and the tokens that end a text."""
        self._rows, self._ends = rows, ends

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        scores = logits.float()
        if self._processors:
            scores = self._process(scores.clone(), drafts)
        choice = draw(scores, generator) if self._sample else best(scores)
        if self._one_node and self._processors:
            rows = range(len(choice)) if drafts is None else self._rows.indices
            self._chosen = dict(zip(rows, choice.flatten().tolist(), strict=True))
        return choice

    def _process(self, scores: Tensor, drafts: Drafts | None) -> Tensor:
        if drafts is not None and self._one_node:
            return self._process_batch(scores, drafts.tokens)
        if drafts is None or all(type(one) in _TEXT_FREE for one in self._processors):
            rows = scores.flatten(0, -2)
            ids = self._prompts if drafts is None else self._prompts.new_zeros(len(rows), 0)
            processed: Tensor = self._processors(ids, rows)
            return processed.view_as(scores)
        depths, paths = drafts.tree.position_ids, drafts.tree.paths
        if not drafts.tree.per_row:
            depths, paths = depths.expand(len(scores), -1), paths.expand(len(scores), -1, -1)
        for row, index in enumerate(self._rows.indices):
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

    def _process_batch(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """One call for all rows, of which ended ones end with one end token: scores [B, 1, V] and tokens [B, 1]."""
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
