"""Tree decoding inside stock `generate`: the same texts in fewer forwards.

    out = model.generate(**inputs, max_new_tokens=64, custom_generate=treeopt.tree_generate, heads=heads, tree=tree)

Pass stop strings as `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`: 5.24 passes no tokenizer on.
"""

import inspect
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation import logits_process as stock
from transformers.generation.streamers import BaseStreamer

from treeopt.decode.decoder import Rows, TreeDecoder, advance
from treeopt.decode.draft_metrics import DraftMetrics, Step
from treeopt.decode.rules import Greedy, Rule, best, draw
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Drafts, Proposer
from treeopt.drafting.memory import Memory
from treeopt.drafting.plans import TreeSource
from treeopt.errors import Code, TreeoptError
from treeopt.files.schedules import GivenPlan
from treeopt.files.trees import as_tree
from treeopt.models.base import Base, shown_name
from treeopt.models.given import GivenModel
from treeopt.models.heads import MedusaHeads
from treeopt.policy import TreePolicy
from treeopt.schedule import Schedule
from treeopt.tree import Tree
from treeopt.verify.probe import refused_adapter

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
_BY_ROW = (stock.EncoderRepetitionPenaltyLogitsProcessor, stock.EncoderNoRepeatNGramLogitsProcessor)
# Processors that store the texts of earlier calls, and would store drafts that are rejected later.
_STATEFUL = (stock.UnbatchedClassifierFreeGuidanceLogitsProcessor, stock.SynthIDTextWatermarkLogitsProcessor)


def check_processors(processors: Iterable[Any], stateless: bool | Sequence[type]) -> None:
    """Raise E510 for a processor whose result may depend on its earlier calls.

    Those of transformers depend on the text alone, with two exceptions; others where the user says so by `stateless`.
    """
    given = (stateless,) if isinstance(stateless, type) else stateless or ()
    if given is not True and (isinstance(given, str) or not all(isinstance(one, type) for one in given)):
        raise TypeError(f"stateless_processors={stateless!r}: it is True, or a list of classes of processors")
    declared = (object,) if given is True else tuple(given)
    for one in processors:
        of_transformers = type(one).__module__.split(".")[0] == "transformers"
        if isinstance(one, _STATEFUL) or not (of_transformers or isinstance(one, declared)):
            name = type(one).__name__
            more = f"; stateless_processors=True, or [{name}], says that its result depends on the text alone"
            what = f"the logits processor {name} may depend on its earlier calls"
            why = "a tree also calls it with the paths of drafts that are rejected later"
            raise _unsupported(what, why=why, fix=_FIX + ("" if of_transformers else more))


class Processed(Rule):
    """The choice of stock `generate` after every node: its processors are called with the node's path.

    Prompts int64 [B, T] are padded on the left.
    """

    rows: Rows  # of the next calls; set after the prompts
    most: int  # tokens of a text, padding and prompt counted
    eos: frozenset[int]

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
        """Process the scores [N, V] of one row in place; not those that no text reaches.

        These are at or below a forbidden draft or an end token, or beyond the longest text: stock `generate` calls no
        processor with them, and one of constraints may not know them.
        """
        text = torch.tensor(self.texts[index], device=tokens.device)
        processors, by_row = self._of_row(index)
        copies = len(self._prompts)
        barred = set[int]()
        for depth in range(min(depths[-1] + 1, self.most - 1 - len(text))):
            # The texts of one depth have equal lengths, so one call takes them all.
            nodes = [node for node, at in enumerate(depths) if at == depth]
            if depth:
                above = paths[nodes, depth - 1]
                drawn = tokens[nodes]
                # The choice is one where all tokens are forbidden, too.
                allowed = (scores[above, drawn] > -torch.inf) | (drawn == best(scores[above]))
                over = zip(nodes, above.tolist(), drawn.tolist(), allowed.tolist(), strict=True)
                barred |= {one for one, parent, last, fits in over if parent in barred or last in self.eos or not fits}
                nodes = [node for node in nodes if node not in barred]
            if not nodes:
                break
            ids = torch.cat([text.expand(len(nodes), -1), tokens[paths[nodes, : depth + 1]]], dim=1)
            if not by_row:
                scores[nodes] = processors(ids, scores[nodes])
                continue
            for node, line in zip(nodes, ids, strict=True):  # the result may depend on the row, so it is in each
                scores[node] = processors(line.expand(copies, -1), scores[node].repeat(copies, 1))[index]

    def _of_row(self, index: int) -> tuple[LogitsProcessorList, bool]:
        """The processors for continuations of one row, and whether their result may depend on the place in a batch."""
        found, by_row = LogitsProcessorList(), False
        for one in self._processors:
            by_row |= type(one).__module__ != stock.__name__ or isinstance(one, _BY_ROW)
            ignored = getattr(one, "prompt_ignore_length", None)
            if isinstance(one, stock.RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
                one = stock.RepetitionPenaltyLogitsProcessor(one.penalty, int(ignored[index]))
            if isinstance(one, stock.PrefixConstrainedLogitsProcessor):
                one = stock.PrefixConstrainedLogitsProcessor(_of_one_row(one._prefix_allowed_tokens_fn, index), 1)
            found.append(one)
        return found, by_row


def _of_one_row(allowed: Callable[[int, Tensor], list[int]], index: int) -> Callable[[int, Tensor], list[int]]:
    """A function of allowed tokens for continuations of one row of a batch."""
    return lambda _, ids: allowed(index, ids)


MOST_KEPT = 4  # decoders of a model; the one that was not used for the longest time is dropped
# Other arguments of `generate` that are replaced here or have no effect, after they were checked.
_CACHES = ("cache", "past_key_values", "cache_params")  # the names that stock `generate` gives to a cache
_KNOWN = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", *_CACHES}
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class BorrowedBase(Base):
    """A `Base` that does not keep its model alive; whoever uses it holds the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        vars(self).update(_model=weakref.ref(model), tokenizer=None, name=shown_name(model), notes=())

    @property
    def model(self) -> PreTrainedModel:
        found: PreTrainedModel | None = vars(self)["_model"]()
        assert found is not None, "the model was deleted"
        return found


_kept: weakref.WeakKeyDictionary[PreTrainedModel, list[tuple[Any, TreeDecoder]]] = weakref.WeakKeyDictionary()
_kept_lock = threading.Lock()


@contextmanager
def kept_decoder(
    model: PreTrainedModel, heads: Any, tree: Any, drafter: Any, draft: Any, memory: Memory | None = None
) -> Iterator[TreeDecoder]:
    """A decoder for one call, taken away from those that earlier calls with the same arguments have returned, or made.

    Two threads therefore share none. After an error it is not returned.
    """
    if not isinstance(tree, (str, os.PathLike, Tree, TreePolicy, Schedule, TreeSource, NoneType)):
        tree = as_tree(tree)
    key = _key(model, heads, tree, drafter, draft)
    with _kept_lock:
        mine = [] if key is None else _kept.setdefault(model, [])
        mine[:] = [one for one in mine if key and one[0][0] == key[0]]  # no call can use those of another setting
        place = next((i for i, one in enumerate(mine) if one[0] == key), None)
        decoder = None if place is None else mine.pop(place)[1]
    if decoder is None:
        decoder = TreeDecoder(BorrowedBase(model), heads, tree, drafter=drafter, draft=draft)
    yield decoder if memory is None else decoder.with_memory(memory)
    decoder.acceptance = Greedy()  # the call's rule holds its texts
    with _kept_lock:
        mine[:] = [(key, decoder), *mine][:MOST_KEPT]


def _key(model: PreTrainedModel, heads: Any, tree: Any, drafter: Any, draft: Any) -> tuple[Any, ...] | None:
    """Equal for the same arguments; None where no decoder is kept, as an argument may hold the model, or is wrong.

    Trees are compared by value, files by time and size, heads also by how often they were written to.
    """
    known = isinstance(drafter, (Drafter, str, os.PathLike, NoneType)) and isinstance(heads, (nn.Module, NoneType))
    if not known or isinstance(tree, TreeSource) or getattr(draft, "model", draft) is model:
        return None
    tensors = list(heads.parameters()) if isinstance(heads, nn.Module) else []
    written = [(one.data_ptr(), one.dtype, None if one.is_inference() else one._version) for one in tensors]
    base, config = BorrowedBase(model), model.config
    windows = getattr(config.get_text_config(), "sliding_window", None)  # a decoder reads it once, and the context
    setting = model.dtype, model.device, config._attn_implementation, base.vocab_size, base.context, windows
    of_draft = getattr(draft, "dtype", None), getattr(draft, "device", None)
    return setting, heads, written, of_draft, *map(_named, (tree, drafter, draft))


def _named(given: Any) -> Any:
    """A file's path, time and size; another argument as it is."""
    if not isinstance(given, (str, os.PathLike)):
        return given
    path = os.path.abspath(os.fsdecode(given))
    try:
        found = os.stat(path)
    except OSError:
        return path, None
    return path, found.st_mtime_ns, found.st_size, found.st_ino


@dataclass
class TreeGenerateOutput(GenerateDecoderOnlyOutput):
    """The output record of stock `generate`, with the steps and without a cache.

    Attributes:
        step_lengths: for each row, the number of tokens of each step.
        step_draft_tokens: for each row, the number of drafts that each step verified; 0 where it verified none.
        tree_depth: D, the greatest number of drafts that a step can accept.
    """

    # Always set; the class of transformers demands that defaults are None.
    step_lengths: tuple[tuple[int, ...], ...] = None  # type: ignore[assignment]
    step_draft_tokens: tuple[tuple[int, ...], ...] = None  # type: ignore[assignment]
    tree_depth: int = None  # type: ignore[assignment]

    @property
    def tokens_per_step(self) -> float:
        """tau of the batch: all tokens over all steps."""
        return sum(map(sum, self.step_lengths)) / sum(map(len, self.step_lengths))

    @property
    def draft_metrics(self) -> DraftMetrics:
        """Verified and accepted drafts of the batch; `DraftMetrics.of_steps` gives those of a row."""
        rows = zip(self.step_lengths, self.step_draft_tokens, strict=True)
        return DraftMetrics.total(DraftMetrics.of_steps(*row, self.tree_depth) for row in rows)


def tree_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    heads: MedusaHeads | None = None,
    tree: GivenPlan | TreeSource | None = None,
    drafter: Drafter | Proposer | str | os.PathLike[str] | None = None,
    draft: GivenModel | None = None,
    memory: Memory | None = None,
    text_streamer: BaseStreamer | None = None,
    stateless_processors: bool | Sequence[type] = False,
    **model_kwargs: Any,
) -> Tensor | TreeGenerateOutput:
    """The decoding function for `model.generate(..., custom_generate=tree_generate, drafter=...)`.

    Greedy texts equal those of stock `generate` token for token; with `do_sample=True` texts have its distribution.
    Logits processors are called with the path of each node, stopping criteria after each token. A processor that counts
    its calls, such as a grammar's matcher, would count the paths of drafts as text. Therefore processors that are not
    part of transformers are refused unless they are declared stateless, and so are the two of transformers that store
    the texts of their calls.

    Args:
        model: a stock causal language model.
        input_ids: int64 [B, T], padded on the left.
        logits_processor: as `generate` made them.
        stopping_criteria: as `generate` made them.
        generation_config: as `generate` made it.
        heads: the model's draft heads.
        tree: as for `TreeDecoder`.
        drafter: as for `TreeDecoder`. What is made from heads, tree, drafter and draft is kept for the next call with
            the same ones; a file is read again after it has changed, the drafter that a tree's file names with it.
        draft: the draft model of the drafter, as for `TreeDecoder`.
        memory: earlier texts, as for `TreeDecoder`; the texts of this call are added.
        text_streamer: a streamer; without it that of the running `generate`, which transformers does not pass.
        stateless_processors: True, or the classes of processors whose result depends only on the tokens and scores of
            a call.
        model_kwargs: other arguments of `generate`. The attention mask is used, an empty cache is left empty.

    Returns:
        int64 [B, T + new]; a `TreeGenerateOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: with heads, without a tree or a drafter.
        TreeoptError: E510 for options that tree decoding does not support (beam search, assisted decoding, inputs other
            than token ids, a cache that holds tokens, prompt learning of peft, masks that are not left padding,
            positions that are not those of the mask, scores and attentions of each step, undeclared processors); as
            `TreeDecoder` and `TreeDecoder.generate`.
    """
    config, text_streamer = generation_config or model.generation_config, text_streamer or _of_generate("streamer")
    processors, criteria = logits_processor or LogitsProcessorList(), stopping_criteria or StoppingCriteriaList()
    _check_supported(model, config, model_kwargs)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    _check_positions(model_kwargs.get("position_ids"), list(map(len, prompts)), input_ids.shape[1])
    check_processors(processors, stateless_processors)
    with kept_decoder(model, heads, tree, drafter, draft, memory) as decoder:
        rule = decoder.acceptance = Processed(processors, input_ids, sample=bool(config.do_sample))
        budget = (criteria.max_length or decoder.base.context) - input_ids.shape[1]
        rows = decoder.prefill(prompts, budget)
        text = _Output(input_ids, criteria, config, budget, text_streamer)
        decoder.memory = None  # a criterion may end a text within a step: the texts are added below
        rule.rows, rule.most, rule.eos = rows, budget + input_ids.shape[1], text.eos
        left = dict.fromkeys(rows.indices, budget)
        for emitted in advance(decoder, rows, left, text.eos):
            for row, tokens in emitted.items():
                rule.texts[row] += tokens
            text.add(emitted)
            left.update(dict.fromkeys(text.done, 0))
    if memory is not None:
        memory.add(*([*one.tolist(), *new[:n]] for one, new, n in zip(prompts, text.tokens, text.lengths, strict=True)))
    if text_streamer is not None:
        text_streamer.end()
    return text.record(decoder.trees.depth) if config.return_dict_in_generate else text.ids.contiguous()


class _Output:
    """The output of a batch as in stock `generate`: rows of equal length, criteria called after every token.

    Rows accept different numbers of tokens; a column is published when every unfinished row has it.
    """

    def __init__(
        self,
        prompts: Tensor,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        budget: int,
        text_streamer: BaseStreamer | None,
    ) -> None:
        ends = [one.eos_token_id for one in criteria if isinstance(one, EosTokenCriteria)]
        self.eos = frozenset(token for ids in ends for token in ids.tolist())
        self._ended: set[int] = set()  # rows ended by a criterion
        self._filled = self._prompt = prompts.shape[1]
        self._ids = torch.cat([prompts, prompts.new_zeros(len(prompts), budget)], dim=1)
        self._criteria = criteria
        # As in stock `generate`: without an end token, rows that a criterion has ended continue until all have ended.
        padded = any(hasattr(one, "eos_token_id") for one in criteria)
        self._pad = int(config._pad_token_tensor) if padded else None
        self._streamer = text_streamer
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._steps: list[list[Step]] = [[] for _ in prompts]
        self.lengths = [0] * len(prompts)  # published tokens of each row up to its end

    @property
    def ids(self) -> Tensor:
        """int64 [B, T + new]: the prompts and the published tokens."""
        return self._ids[:, : self._filled]

    @property
    def done(self) -> set[int]:
        """Rows that need no more tokens."""
        over = self._pad is not None or len(self._ended) == len(self.tokens)
        return self._ended if over else set()

    def record(self, depth: int) -> TreeGenerateOutput:
        """The output with each row's steps, up to the row's end."""
        made: list[list[Step]] = []
        for steps, length in zip(self._steps, self.lengths, strict=True):
            pairs = zip(steps, itertools.accumulate(map(len, steps), initial=0), strict=False)
            made.append([step.cut(length - begin) for step, begin in pairs if begin < length])
        return TreeGenerateOutput(
            sequences=self.ids.contiguous(),
            step_lengths=tuple(tuple(map(len, row)) for row in made),
            step_draft_tokens=tuple(tuple(step.num_draft_tokens for step in row) for row in made),
            tree_depth=depth,
        )

    def add(self, emitted: Mapping[int, Step]) -> None:
        """Add a step of some rows, and publish the columns that are complete, until all rows have ended."""
        for row, step in emitted.items():
            self.tokens[row].extend(step)
            self._steps[row].append(step)
        rows = range(len(self.tokens))
        while len(self._ended) < len(rows):
            at = self._filled - self._prompt
            if any(len(self.tokens[row]) <= at for row in rows if row not in self.done):
                return
            over = self.done
            column = [self._pad if row in over else self.tokens[row][at] for row in rows]
            self._ids[:, self._filled] = torch.tensor(column, device=self._ids.device)
            self._filled += 1
            stop = self._criteria(self.ids, None).tolist()
            if self._streamer is not None:
                self._streamer.put(self._ids[:, self._filled - 1].cpu())
            for row in rows:
                self.lengths[row] += row not in over
            self._ended |= {row for row in rows if stop[row]}


def _check_supported(model: PreTrainedModel, config: GenerationConfig, more: Mapping[str, Any]) -> None:
    mode = GenerationMode.ASSISTED_GENERATION if _of_generate("assistant_model") else config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _unsupported(f"the generation mode is {mode.value.replace('_', ' ')}")
    outputs = [name for name in _OUTPUTS if config.return_dict_in_generate and getattr(config, name)]
    if outputs:
        raise _unsupported(f"{', '.join(outputs)} is set")
    strange = sorted(name for name, value in more.items() if value is not None and name not in _KNOWN)
    if strange or model.config.is_encoder_decoder:
        what = f"the model takes {', '.join(strange)}" if strange else "the model has an encoder"
        raise _unsupported(what, why="a tree is verified on token ids alone")
    _check_start(model, more)


def _of_generate(name: str) -> Any:
    """An argument of the running `generate` that it does not pass to its decoding function."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def _check_start(model: PreTrainedModel, more: Mapping[str, Any]) -> None:
    """Raise E510 where the model would read entries of a cache, or of a soft prompt, before the prompt."""
    layers = [layer for name in _CACHES for layer in getattr(more.get(name), "layers", ())]
    held = max((int(one.get_seq_length()) for one in layers if hasattr(one, "get_seq_length")), default=0)
    if held or any(any(getattr(one, "has_previous_state", {}).values()) for one in layers):
        raise _unsupported(
            f"the cache holds {held} tokens" if held else "the cache holds the state of a text",
            why="a cache has no token ids, so it cannot be compared with the prompt",
            fix="leave out the cache, and give the whole text as input_ids; or leave out custom_generate",
        )
    if kind := refused_adapter(model):
        why = "it depends on the place or the row of a token, and a tree is verified on token ids alone"
        raise _unsupported(f"the model has an adapter of peft's kind {kind}", why=why)


def _check_positions(positions: Tensor | None, lengths: Sequence[int], width: int) -> None:
    """Raise E510 unless the positions of each row [.., 1 or B, T] count its tokens, which its padding precedes."""
    if positions is None:
        return
    given = (positions[None] if positions.ndim == 1 else positions).cpu()
    standard = torch.arange(width) - (width - torch.tensor(lengths)[:, None])  # [B, T], negative in the padding
    if given.shape[-2:] not in ((1, width), standard.shape) or ((given != standard) & (standard >= 0)).any():
        what, why = "position_ids do not count the tokens of each row from 0", "a tree is at the positions after them"
        raise _unsupported(what, why=why, fix="leave out position_ids")


def _unsupported(what: str, *, why: str = "", fix: str = _FIX) -> TreeoptError:
    return TreeoptError(Code.GENERATE_UNSUPPORTED, what, why=why, fix=fix)


def _prompts(ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The rows without their padding on the left."""
    if mask is None:
        return list(ids)
    if mask.shape != ids.shape or (mask[:, 1:] < mask[:, :-1]).any():
        raise _unsupported("the attention mask hides tokens that are not padding on the left")
    return [row[len(row) - int(real) :] for row, real in zip(ids, mask.sum(-1), strict=True)]
