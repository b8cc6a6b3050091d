"""The rule of acceptance inside stock `generate`: its logits processors are applied to the path of every node."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from treeopt.decode import accept
from treeopt.decode.batch import Rows
from treeopt.decode.processor_state import Watch, watched
from treeopt.decode.rules import Exact
from treeopt.drafting.interface import Drafts

# Processors that look at scores alone, never at the text; all nodes go through them in one call.
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
# Processors that know the rows of the batch apart.
_BY_ROW = (
    stock.PrefixConstrainedLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
)


Level = tuple[list[int], Tensor]  # the n nodes of one depth, and their paths int64 [n, depth + 1]


class Processed(Exact):
    """The choice of stock `generate` after every node: its processors are called with the node's path.

    Where trees have one node, processors are called as `generate` calls them: once a token, with all rows of the batch.

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
        self.texts: list[list[int]] = prompts.tolist()  # of each prompt, padding and emitted tokens included
        self._prompts = prompts
        self._processors = processors
        self._sample = sample
        self._pad = pad
        self._stateless = stateless
        self._watch = Watch(())
        self._one_node = False
        self._chosen: dict[int, int] = {}  # with one node, of each row the token that was chosen last

    def verify_trees(self, nodes: int) -> None:
        """Set how many nodes the trees have; with more than one, processors must have no state.

        Raises:
            TreeoptError: E510 where the state of a processor cannot be seen. Where it changes in a call, `choose`
                raises the same.
        """
        self._one_node = nodes == 1
        if not self._one_node:
            self._watch = Watch(watched(self._processors, self._stateless))

    def follow(self, rows: Rows, ends: Collection[int]) -> None:
        """Set the rows that are judged from now on, and the tokens that end a text."""
        self._rows = rows
        self._ends = ends

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        scores = logits.float()
        if self._processors:
            scores = self._process(scores.clone(), drafts)
            self._watch.check()
        choice = accept.draw(scores, generator) if self._sample else accept.best(scores)
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

    def _process_row(self, index: int, scores: Tensor, tokens: Tensor, levels: list[Level]) -> None:
        """Process the scores [N, V] of one row in place."""
        text = torch.tensor(self.texts[index], device=tokens.device)
        processors = self._of_row(index)
        # The texts of the nodes of one depth are equally long, so stock processors take them together.
        for nodes, paths in levels if processors else _one_node_each(levels):
            ids = torch.cat([text.expand(len(nodes), -1), tokens[paths]], dim=1)
            if processors:
                scores[nodes] = processors(ids, scores[nodes])
            else:  # a processor that tells rows apart finds the node where its row lies in the batch
                copies = len(self._prompts)
                out = self._processors(ids.expand(copies, -1), scores[nodes].repeat(copies, 1))
                scores[nodes] = out[index]

    def _process_batch(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """One call for all rows of the batch, those that have ended among them: [B, 1, V] and [B, 1] of the others.

        A row that has ended shows its end once, as it does in `generate`, and is padded from there on.
        """
        texts = [list(text) for text in self.texts]
        for index, token in zip(self._rows.indices, tokens[:, 0].tolist(), strict=True):
            texts[index].append(token)
        for index, token in self._chosen.items():
            if index not in self._rows.indices and token in self._ends:
                texts[index].append(token)
        longest = max(map(len, texts))
        ids = torch.tensor([text + [self._pad] * (longest - len(text)) for text in texts], device=tokens.device)
        every = scores.new_zeros(len(texts), scores.shape[-1])
        every[self._rows.indices] = scores[:, 0]
        processed: Tensor = self._processors(ids, every)
        return processed[self._rows.indices][:, None]

    def _of_row(self, index: int) -> LogitsProcessorList | None:
        """The processors for any number of continuations of one row; None where they may know rows apart."""
        found = LogitsProcessorList()
        for one in self._processors:
            if type(one).__module__ != stock.__name__ or isinstance(one, _BY_ROW):
                return None
            ignored = getattr(one, "prompt_ignore_length", None)
            if isinstance(one, stock.RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
                one = stock.RepetitionPenaltyLogitsProcessor(one.penalty, int(ignored[index]))
            found.append(one)
        return found


def _by_depth(depths: Tensor, paths: Tensor) -> list[Level]:
    """The nodes of one tree by depth: depths [N], paths [N, D+1]."""
    known = depths.tolist()
    levels = []
    for depth in range(known[-1] + 1):
        nodes = [node for node, at in enumerate(known) if at == depth]
        levels.append((nodes, paths[nodes, : depth + 1]))
    return levels


def _one_node_each(levels: Sequence[Level]) -> list[Level]:
    """The same nodes, one at a time."""
    return [([node], paths[i : i + 1]) for nodes, paths in levels for i, node in enumerate(nodes)]
