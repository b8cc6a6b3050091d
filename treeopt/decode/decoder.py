"""The decoder: draft, verify, accept, keep, on a stock model, for one text or a batch and any acceptance rule.

A custom decoding loop uses two methods:

    rows = decoder.prefill([[1, 403, 407], [1, 311]], max_new_tokens=64)
    while rows.indices:                      # the prompts still in progress
        for tokens in decoder.step(rows):    # one forward: a list for each row, its root and the accepted drafts
            ...
        rows.keep([...])                     # drop the rows whose text has ended
"""

import copy
import os
from collections.abc import Iterator, Sequence
from numbers import Integral
from types import NoneType
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treeopt.decode.draft_metrics import Decoded, Step
from treeopt.decode.rules import NOT_A_NUMBER, Greedy, Rule
from treeopt.defaults import ONE_NODE
from treeopt.drafter import Drafter
from treeopt.drafting.interface import AcceptedPart, Drafts, Proposer, ProposerSession, reads_of
from treeopt.drafting.memory import Memory, search
from treeopt.drafting.plans import TreeSource, trees_for, untrained
from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.schedules import GivenPlan, as_plan, as_plan_for
from treeopt.models.base import Base, shown_name
from treeopt.models.given import GivenModel, as_draft
from treeopt.models.heads import MedusaHeads
from treeopt.tree import ROOT
from treeopt.verify.buffers import PAD
from treeopt.verify.paths import PathSession
from treeopt.verify.probe import check_ready, forward_of
from treeopt.verify.session import Session, pick


class Rows:
    """Texts in progress; made by `TreeDecoder.prefill`, advanced by `TreeDecoder.step`.

    Attributes:
        indices: the prompt of each row.
        roots: each row's next token, chosen but not yet emitted; the next step emits it first.
        root: the same as int64 [B] on the model's device.
        hidden: float [B, d], the states that chose them.
        prompts: the token ids of each prompt.
    """

    def __init__(
        self,
        session: Session | PathSession,
        drafting: ProposerSession,
        roots: list[int],
        root: Tensor,
        hidden: Tensor,
        logits: Tensor | None,
        generator: torch.Generator | None,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self.prompts = prompts
        self.indices = list(range(len(roots)))
        self.session, self.drafting = session, drafting
        self.roots, self.root, self.hidden = roots, root, hidden
        self.generator = generator
        with torch.inference_mode():
            observed = drafting.observe(hidden, logits)
        if observed is not None:
            drafting.look(observed.numpy(force=True))

    def advance_(self, drafts: Drafts, verified: tuple[Tensor, Tensor], node: Tensor, root: Tensor) -> list[Step]:
        """Keep each row's path to the accepted node int64 [B], and continue with the roots int64 [B] chosen after it.

        Verified are logits [B, N, V] and hidden states [B, N, d] of all nodes. Returns the step of each row.
        """
        logits, hidden = verified
        self.hidden = pick(hidden, node)
        observed = self.drafting.observe(self.hidden, pick(logits, node))
        one_node = drafts.tokens.shape[1] == 1
        paths = node[:, None] if one_node else drafts.tree.paths_to(node)  # [B, D+1]
        parts = [root[:, None]] if one_node else _of_step(drafts, paths, root)
        columns = sum(part.shape[1] for part in parts)
        if observed is not None:
            parts.append(observed)
        host = torch.cat([part.int() for part in parts], dim=1).numpy(force=True)  # the only transfer to the host
        numbers: list[list[int]] = host[:, :columns].tolist()
        if one_node:
            known, emitted = [[ROOT]] * len(numbers), [Step([old]) for old in self.roots]
        else:
            known, emitted = _emitted(numbers, paths.shape[1], drafts)
        self.session.keep(known, paths)
        roots = [row[0] for row in numbers]
        new = [[*step[1:], next_root] for step, next_root in zip(emitted, roots, strict=True)]
        self.drafting.keep(AcceptedPart(new, paths, logits, hidden, drafts))
        if observed is not None:
            self.drafting.look(host[:, columns:])
        self.roots, self.root = roots, root
        return emitted

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows (0 .. B-1, ascending) only; they are renumbered from 0."""
        if len(rows) == len(self.indices):
            return
        self.indices = [self.indices[row] for row in rows]
        self.roots = [self.roots[row] for row in rows]
        if rows:
            self.drafting.select(rows)
            self.session.select(rows)
            self.root, self.hidden = self.root[list(rows)], self.hidden[list(rows)]

    def mark(self) -> tuple[Any, ...]:
        """The place in the texts, for `rewind`."""
        return self.session.mark(), self.drafting.mark(), self.roots, self.root, self.hidden

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Undo the steps since `mark`; the rows must be the same."""
        session, drafting, self.roots, self.root, self.hidden = mark
        self.session.rewind(session)
        self.drafting.rewind(drafting)

    def check(self, base: Base) -> None:
        """Raise E504, which names the base, where a row's next token was chosen from scores that are not finite."""
        _check_chosen(base, self.roots, self.indices, self.session.lengths)


def _check_chosen(base: Base, roots: Sequence[int], indices: Sequence[int], lengths: Sequence[int]) -> None:
    if NOT_A_NUMBER in roots:
        row, error = roots.index(NOT_A_NUMBER), base.not_finite("logits")
        error.at = f"prompt {indices[row]}, after {lengths[row]} tokens of prompt and text"
        raise error


def _of_step(drafts: Drafts, paths: Tensor, root: Tensor) -> list[Tensor]:
    """The columns that the host reads: next root, accepted path, its tokens and, where some nodes are void, the number
    of those that no rule can accept: the void ones and all below them.
    """
    tokens = drafts.tokens.gather(1, paths.clamp(min=0))
    void = [] if drafts.void is None else [drafts.tree.along_paths(drafts.void.float())]
    return [root[:, None], paths, tokens, *((above > 0).sum(1, keepdim=True) for above in void)]


def _emitted(rows: list[list[int]], width: int, drafts: Drafts) -> tuple[list[list[int]], list[Step]]:
    """The nodes of each row's accepted path, and its tokens, from the columns of `_of_step` with paths [B, width]."""
    most = drafts.tokens.shape[1] - 1
    known = [[node for node in row[1 : width + 1] if node != PAD] for row in rows]
    steps = [
        Step(row[width + 1 :][: len(path)], most if drafts.void is None else most - row[-1])
        for row, path in zip(rows, known, strict=True)
    ]
    return known, steps


Prompt = Tensor | Sequence[int]
_RECORDS = (Drafter, str, os.PathLike)  # what a drafter is given by
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)


class TreeDecoder:
    """A decoder of any number of texts: a base model, the trees of a drafter and an acceptance rule.

    Args:
        base: a loaded `Base`, or any stock causal language model of `transformers`.
        heads: its draft heads; None where the drafter has none, and for the one-node tree, which decodes
            autoregressively in the same loop.
        tree: a `Tree` that is at most as deep as the drafter has levels, a `TreePolicy`, a `Schedule` of these by batch
            and context, a list of paths, a file of one of these, or a name of `treeopt list`. A `TreeSource` needs
            neither heads nor drafter. None for the plan that the drafter recommends; without a drafter, and without
            heads, for per-step trees of 16 nodes that nothing was learned for: of `draft`, or of `Drafter.untrained`.
        drafter: the record that the tree or policy was made for, its file, or a `Proposer`; None for the guesses of
            the heads, and where the tree's file names its drafter.
        draft: the draft model or module of the drafter, in any form that `model` has elsewhere; None where it has none.
        acceptance: `Greedy()`, `Sample(...)`, `Rejection(...)` or the lossy `Typical(...)`.
        compile: run the forward over trees through `torch.compile`, as is always done for a `Base` with `compile`. The
            first two steps then take many seconds, later steps less time than without. Rounding differs from the eager
            forward.
        probe: check that the base can verify trees (once for each model).
        memory: earlier texts, in which the drafter searches too; the texts of a batch are added when all have ended. A
            custom loop adds its texts itself.

    Raises:
        TreeoptError: E101, E102 where the tree has levels or ranks that the drafter does not have, E212 where the heads
            do not fit the base, E213 where the draft model has another tokenizer, E223 where the drafter does not fit,
            recommends no tree (if none is given), is not the one that the tree was made for, or searches no memory,
            E502 where the base or the draft model cannot verify trees, E510 for a memory with a lossy rule.
        TypeError: where base, heads, drafter or acceptance have another type.
        ValueError: where heads are given and neither a tree nor a drafter, or a draft with heads, with a tree of no
            drafter, or with a `TreeSource` or `Proposer`.

    The base and heads are not compared with those that the tree was built for, because any tree is lossless; the
    command line warns where they differ.
    """

    def __init__(
        self,
        base: Base | PreTrainedModel,
        heads: MedusaHeads | None = None,
        tree: GivenPlan | TreeSource | None = None,
        *,
        drafter: Drafter | Proposer | str | os.PathLike[str] | None = None,
        draft: GivenModel | None = None,
        acceptance: Rule | None = None,
        compile: bool = False,
        probe: bool = True,
        memory: Memory | None = None,
    ) -> None:
        _check_types(base, heads, drafter, acceptance, memory)
        self.base = base if isinstance(base, Base) else Base(base, None, shown_name(base))
        self.acceptance: Rule = acceptance or Greedy()
        draft = None if draft is None else as_draft(draft, self.base)
        self.trees = _trees(self.base, heads, tree, drafter, draft)
        self.tree, self.memory = self.trees.tree, memory
        if memory is not None:
            self.trees = self._searching(memory)
        self.forward = forward_of(
            self.base.reading(reads_of(self.trees)),
            self.trees.nodes,
            self.trees.depth,
            compile=compile or self.base.compile,
            probe=probe,
        )

    def with_memory(self, memory: Memory) -> Self:
        """The same decoder with a memory."""
        _check_types(self.base, None, None, None, memory)
        made = copy.copy(self)
        made.memory, made.trees = memory, self._searching(memory)
        return made

    def _searching(self, memory: Memory) -> TreeSource:
        """A copy of the trees whose drafter searches a memory."""
        if self.acceptance.lossy:
            what = f"a memory would change the texts of {type(self.acceptance).__name__}, which is lossy"
            raise TreeoptError(Code.GENERATE_UNSUPPORTED, what, why="its texts depend on the drafts", fix="Greedy()")
        trees = copy.copy(self.trees)
        if trees.nodes > ONE_NODE:
            proposer: Any = search(getattr(trees, "proposer", None), memory)
            vars(trees).update(proposer=proposer, window=proposer.window)
        memory.fit(self.base.vocab_size, self.base.name)
        return trees

    @overload
    def generate(self, ids: Prompt, max_new_tokens: int) -> Decoded: ...

    @overload
    def generate(self, ids: Sequence[Prompt], max_new_tokens: int) -> list[Decoded]: ...

    def generate(self, ids: Prompt | Sequence[Prompt], max_new_tokens: int) -> Decoded | list[Decoded]:
        """Continue one prompt, or a list of prompts in one batch.

        Args:
            ids: one prompt's token ids, int64 [T] or [1, T] or a list of numbers; or a list of such prompts, of any
                lengths, without padding, or int64 [B, T]. A list of none gives a list of none.
            max_new_tokens: maximum for each text; fewer where the model ends the text (the end token is included).

        Returns:
            One `Decoded`, or one for each prompt of a list. In float32 and with the greedy rule a prompt gives the same
            text in any batch.

        Raises:
            TreeoptError: E502 where the model is in training mode, E503 where a prompt is empty or does not fit into
                the context with the new tokens, E504 where the model's logits are not finite.
            ValueError: where the ids are not token ids of the model.
        """
        prompts, alone = _prompts(ids, self.base)
        made = [Decoded([], self.trees.depth) for _ in prompts]
        for step in self.start_all(prompts, max_new_tokens) if prompts else ():
            for index, tokens in step.items():
                made[index].steps.append(tokens)
        return made[0] if alone else made

    def start(self, ids: Prompt, max_new_tokens: int) -> Iterator[Step]:
        """Prefill one prompt immediately, as for `generate`; iterating over the result runs one step at a time."""
        prompts, alone = _prompts(ids, self.base)
        if not alone:
            raise ValueError("start continues one prompt; generate takes a list of them")
        return (step[0] for step in self.start_all(prompts, max_new_tokens))

    def start_all(self, ids: Sequence[Prompt], max_new_tokens: int) -> Iterator[dict[int, Step]]:
        """Prefill a batch of prompts immediately, as for `generate`; iterating over the result runs one step at a time.

        Yields one step of every text in progress, by the index of its prompt in `ids`.
        """
        rows = self.prefill(ids, max_new_tokens)
        return advance(self, rows, dict.fromkeys(rows.indices, max_new_tokens), frozenset(self.base.eos_ids))

    @torch.inference_mode()
    def prefill(self, ids: Sequence[Prompt], max_new_tokens: int) -> Rows:
        """Run the prompts, as for `generate`, in one forward, and choose the first token of each.

        `max_new_tokens` are reserved in the cache for each row; a row must not be stepped beyond it.
        """
        check_ready(self.base)
        prompts, _ = _prompts(ids, self.base)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral):
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}, not a whole number")
        if max_new_tokens < 1 or not prompts:
            what = f"max_new_tokens is {max_new_tokens}" if prompts else "no prompt is given"
            raise TreeoptError(Code.CONTEXT_FULL, what, fix="give at least one prompt, and generate one token or more")
        session, logits, states = self.forward.begin(prompts, max_new_tokens)
        seed = self.acceptance.seed
        generator = None if seed is None else torch.Generator(self.base.device).manual_seed(seed)
        root = self.acceptance.first(logits, generator)
        roots: list[int] = root.tolist()
        _check_chosen(self.base, roots, range(len(roots)), [len(prompt) for prompt in prompts])
        window = self.trees.window
        texts = [prompt[max(0, len(prompt) + 1 - window) :].tolist() if window else [] for prompt in prompts]
        drafting = self.trees.start([[*text, first] for text, first in zip(texts, roots, strict=True)])
        if reads_of(self.trees):
            drafting.read(states)
        hidden = torch.stack([one[-1] for one in states])
        return Rows(session, drafting, roots, root, hidden, logits, generator, [one.tolist() for one in prompts])

    @torch.inference_mode()
    def step(self, rows: Rows) -> list[Step]:
        """Verify one tree for each row in one forward, advance the rows in place, and give each row's root and accepted
        drafts.

        A step has 1 to D + 1 tokens, not cut at the end of a text or at the budget. There is one synchronisation with
        the device, and one a level with a draft model. E504 where a root was chosen from logits that are not finite.
        """
        rows.check(self.base)
        drafts = self.trees.draft(rows.drafting, rows.root, rows.hidden, max(rows.session.lengths))
        verified = rows.session.verify(drafts.tokens, drafts.tree)
        node, root = self.acceptance.accept(drafts, verified[0], rows.generator)
        return rows.advance_(drafts, verified, node, root)


def _check_types(base: Any, heads: Any, drafter: Any, acceptance: Any, memory: Any) -> None:
    types = (
        ("base is a model of transformers, or what treeopt.load_base gives", base, (Base, nn.Module)),
        ("heads is None or treeopt.MedusaHeads, such as treeopt.load_heads(...).heads", heads, (nn.Module, NoneType)),
        ("drafter is None, treeopt.Drafter, its file, or a Proposer", drafter, (*_RECORDS, Proposer, NoneType)),
        ("memory is None, or treeopt.Memory, such as treeopt.load_memory(...)", memory, (Memory, NoneType)),
        ("acceptance is None, Greedy(), Sample(...) or Typical(...)", acceptance, (Rule, NoneType)),
    )
    for what, given, known in types:
        if isinstance(given, type) or not isinstance(given, known):
            raise TypeError(f"{what}, not an object of type {type(given).__name__}")


def _trees(
    base: Base,
    heads: MedusaHeads | None,
    tree: GivenPlan | TreeSource | None,
    drafter: Drafter | Proposer | str | os.PathLike[str] | None,
    draft: Base | None,
) -> TreeSource:
    live = not isinstance(drafter, (*_RECORDS, NoneType))  # a Proposer
    if draft is not None and (isinstance(tree, TreeSource) or live):
        raise ValueError("a draft model takes a tree and the record of a drafter (treeopt learn), or neither")
    if isinstance(tree, TreeSource):
        return tree
    if tree is None and drafter is None and heads is None:
        return trees_for(base, None, *untrained(base, draft), draft)
    if isinstance(drafter, _RECORDS) or drafter is None:
        return trees_for(base, heads, *as_plan_for(tree, drafter), draft)
    if tree is None:
        raise ValueError("a Proposer recommends no tree: give tree= as well")
    return trees_for(base, heads, as_plan(tree), drafter)


def advance(decoder: TreeDecoder, rows: Rows, left: dict[int, int], eos: frozenset[int]) -> Iterator[dict[int, Step]]:
    """Step until every row has ended; one step of every prompt in progress, cut at an `eos` token or its budget.

    `left` has the budgets, decreased in place; the caller sets one to 0 to end its text between steps.
    """
    texts = [list(prompt) for prompt in rows.prompts]  # for the memory
    while rows.indices:
        rows.check(decoder.base)
        # A root that is the last token needs no verification.
        roots = dict(zip(rows.indices, rows.roots, strict=True))
        emitted = {i: Step([root]) for i, root in roots.items() if left[i] == 1 or root in eos}
        left.update(dict.fromkeys(emitted, 0))
        rows.keep([row for row, i in enumerate(rows.indices) if left[i] > 0])
        if rows.indices:
            for i, tokens in zip(rows.indices, decoder.step(rows), strict=True):
                end = next((n for n, token in enumerate(tokens, start=1) if token in eos), len(tokens))
                emitted[i] = tokens.cut(min(left[i], end))
                left[i] = 0 if emitted[i][-1] in eos else left[i] - len(emitted[i])
        for i, tokens in emitted.items():
            texts[i] += tokens
        yield emitted
        rows.keep([row for row, i in enumerate(rows.indices) if left[i] > 0])
    if decoder.memory is not None:
        decoder.memory.add(*texts)


def _prompts(ids: Prompt | Sequence[Prompt], base: Base) -> tuple[list[Tensor], bool]:
    """The prompts as int64 [T] each on the model's device, and whether `ids` is a single prompt."""
    if isinstance(ids, Tensor):
        alone = ids.ndim != 2 or len(ids) == 1
    elif isinstance(ids, (str, bytes)) or not hasattr(ids, "__len__"):
        raise ValueError(f"a prompt is token ids, not {type(ids).__name__}")
    elif len(ids):
        alone = not any(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in ids)
    else:
        alone = getattr(ids, "ndim", 0) == 1  # an empty array is an empty prompt, an empty list holds no prompts
    listed: Any = [ids] if alone else ids
    return [_one_prompt(one, base) for one in listed], alone


def _one_prompt(ids: Prompt, base: Base) -> Tensor:
    try:
        prompt = torch.as_tensor(ids, device=base.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not token ids of one text: {first_line(error)}") from error
    if prompt.ndim == 2 and len(prompt) == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or (prompt.dtype not in _INTEGERS and len(prompt)):
        raise ValueError(
            f"token ids are {prompt.dtype} {list(prompt.shape)}, not integers [T] or [1, T]; a batch: [B, T] or a list"
        )
    prompt = prompt.long()
    if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < base.vocab_size:
        raise ValueError(f"a token id lies outside the vocabulary of {base.vocab_size}")
    return prompt
