"""A text while it is decoded: the text of each step, the sources of its drafts, and one step as a record."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import Step
from treeopt.decode.rejection import DrawnChain
from treeopt.decode.rules import Rule, Sample, best
from treeopt.drafted_step import DraftedStep
from treeopt.drafter import Drafter
from treeopt.drafting.interface import DRAFTER, Drafts
from treeopt.drafting.model import DRAFT_MODEL_SOURCE
from treeopt.drafting.plans import PerStepTrees, ScheduledTrees, StaticTree
from treeopt.drafting.trace import BASE, draft_sources
from treeopt.errors import check_counts
from treeopt.files.schedules import GivenPlan
from treeopt.models.base import Base
from treeopt.models.given import GivenModel
from treeopt.models.heads import MedusaHeads
from treeopt.tree import ROOT, Path, Tree
from treeopt.verify.buffers import PAD


@dataclass(frozen=True)
class Piece:
    """The tokens of one step, and the text that they complete.

    `text` is empty where the step ends inside a character of several bytes; the text of the step that completes the
    character contains it.
    """

    tokens: Step
    text: str


def stream_text(steps: Iterable[Step], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The pieces of a text, one for each step; at the end a piece without tokens where text is left.

    The joined texts equal `whole_text` of all tokens, except for bytes that are not UTF-8: some tokenizers then decode
    the bytes before them differently, after their text was yielded. A tokenizer without a `tokenizers` backend gives
    its text at the end.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    tokens: list[int] = []
    shown, stream = "", DecodeStream(skip_special_tokens=True)
    for step in steps:
        text = ""
        for token in step if isinstance(backend, Tokenizer) else ():
            try:
                text += stream.step(backend, token) or ""
            except Exception:  # the library's only type: bytes that are not UTF-8 changed the text before them
                stream = DecodeStream(skip_special_tokens=True)
                text += stream.step(backend, token) or ""
        tokens += step
        shown += text
        yield Piece(step, text)
    whole = whole_text(tokens, tokenizer)
    if whole.startswith(shown) and whole != shown:
        yield Piece(Step(), whole[len(shown) :])


def token_texts(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token completes, joined as those of `stream_text`; the last has what is left at the end."""
    texts = [piece.text for piece in stream_text((Step([token]) for token in tokens), tokenizer)]
    if len(texts) > len(tokens):
        texts[-2:] = ["".join(texts[-2:])]
    return texts


def whole_text(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of all tokens, without special tokens; spaces are not cleaned up."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


Sources = Mapping[str, int | None]


@dataclass(frozen=True)
class DecodedStep:
    """One step of a text."""

    tokens: tuple[int, ...]  # its root, which is the base model's own token, and the accepted drafts
    texts: tuple[str, ...]  # what each token adds to the text; empty where a character of several bytes is not complete
    # of each token by name, with its rank in that source's list; see `treeopt.drafting.trace`. None is the rank of a
    # token that was drawn at random, and of one whose source is not known
    sources: tuple[Sources, ...]


def decoded_steps(decoder: TreeDecoder, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> list[DecodedStep]:
    """The steps of a decoded text, by one more forward over the whole text; the decoder's base has a tokenizer."""
    tokenizer, trees = decoder.base.tokenizer, decoder.trees
    assert tokenizer is not None
    texts = iter(token_texts([token for step in steps for token in step], tokenizer))
    found: Sequence[Sequence[Sources]]
    if isinstance(trees, StaticTree | PerStepTrees | ScheduledTrees):
        found = draft_sources(decoder.base, trees.proposer, prompt, steps)
    else:
        name = DRAFT_MODEL_SOURCE if isinstance(trees, DrawnChain) else DRAFTER
        found = [[{name: None}] * (len(step) - 1) for step in steps]
    rule = decoder.acceptance
    root = None if isinstance(rule, Sample) and rule.temperature > 0 else 0
    return [
        DecodedStep(tuple(step), tuple(next(texts) for _ in step), ({BASE: root}, *sources))
        for step, sources in zip(steps, found, strict=True)
    ]


_CONTEXT = 8  # tokens before a token that its text may depend on
Seen = tuple[Drafts, Tensor, Tensor, Tensor]  # of a step: logits [1, N, V], the accepted node and the token after it


class Recorder(Rule):
    """The greedy rule, which counts its steps and keeps what it saw in the last."""

    steps = 0
    last: Seen | None = None

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        return best(logits)

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        node, root = super().accept(drafts, logits, generator)
        self.steps += 1
        self.last = drafts, logits, node, root
        return node, root


def draft_step(
    base: Base,
    heads: MedusaHeads | None,
    tree: GivenPlan | None,
    ids: Sequence[int],
    *,
    drafter: Drafter | str | os.PathLike[str] | None = None,
    draft: GivenModel | None = None,
    number: int = 1,
    prompt: str = "",
) -> DraftedStep:
    """Decode a prompt greedily up to step `number`, from 1, and give that step; the text `prompt` is for the record.

    Other arguments and errors are those of `TreeDecoder`; ValueError where the text ends before the step.
    """
    check_counts(number=number)
    recorder = Recorder()
    decoder = TreeDecoder(base, heads, tree, drafter=drafter, draft=draft, acceptance=recorder)
    before, emitted = list(ids), list[int]()
    # One token more than these steps can emit: a last token alone is not verified. The text ends with the context.
    most = number * (decoder.trees.depth + 1) + 1
    for emitted in decoder.start(ids, max(1, min(most, base.context - len(before)))):
        if recorder.steps == number:
            break
        before += emitted
    if recorder.last is None or recorder.steps != number:
        steps = f"{recorder.steps} step{'s' if recorder.steps != 1 else ''} with drafts"
        raise ValueError(f"the text ends after {steps}; there is no step {number}")
    record = _record(recorder.last, decoder.tree, base, before, len(emitted))
    return dataclasses.replace(record, number=number, prompt=prompt)


def _record(seen: Seen, static: Tree | None, base: Base, before: Sequence[int], length: int) -> DraftedStep:
    """The record of a step that emitted `length` tokens after the tokens `before`."""
    drafts, logits, node, root = seen
    drafted: list[int] = drafts.tokens[0].tolist()
    void = [False] * len(drafted) if drafts.void is None else drafts.void[0].tolist()
    path = [node for node in drafts.tree.paths_to(node)[0].tolist() if node != PAD]
    parents = drafts.tree.parents[0] if drafts.tree.per_row else drafts.tree.parents
    scores = logits[0].float()
    chances = (scores[parents, drafts.tokens[0]] - scores.logsumexp(-1)[parents]).exp().tolist()
    tree, order = _grown(parents.tolist(), void) if static is None else (static, list(range(static.nodes)))
    tokens = tuple(None if void[node] else drafted[node] for node in order)
    texts = _texts(base.tokenizer, before, tree, tokens)
    accepted = tuple(order.index(node) for node in path[:length])
    bonus = None if tokens[accepted[-1]] in base.eos_ids else int(root)
    line = [*before, *(token for node in accepted if (token := tokens[node]) is not None)]
    return DraftedStep(
        tree=tree,
        tokens=tokens,
        texts=texts,
        probabilities=tuple(None if node == ROOT or void[node] else chances[node] for node in order),
        accepted=accepted,
        bonus=bonus,
        bonus_text="" if bonus is None else token_text(base.tokenizer, line, bonus),
    )


def _grown(parents: Sequence[int], void: Sequence[bool]) -> tuple[Tree, list[int]]:
    """The tree of a row of per-step trees without its padding, siblings by rank, and each node's number in the row."""
    paths: dict[int, Path] = {ROOT: ()}
    children = [0] * len(parents)
    for node in range(1, len(parents)):
        above = parents[node]
        if not void[node] and above in paths:
            paths[node] = (*paths[above], children[above])
            children[above] += 1
    order = sorted(paths, key=lambda node: (len(paths[node]), paths[node]))
    return Tree(tuple(paths[node] for node in order[1:])), order


def _texts(
    tokenizer: PreTrainedTokenizerBase | None, before: Sequence[int], tree: Tree, tokens: Sequence[int | None]
) -> tuple[str, ...]:
    """The text that each node's token adds to its path; empty for a node without a draft."""
    lines: list[list[int]] = []  # the text up to each node, the node included
    texts = []
    for node, token in enumerate(tokens):
        above = lines[tree.parents[node]] if node else list(before[-_CONTEXT:])
        texts.append("" if token is None else token_text(tokenizer, above, token))
        lines.append(above if token is None else [*above, token])
    return tuple(texts)


def token_text(tokenizer: PreTrainedTokenizerBase | None, before: Sequence[int], token: int) -> str:
    """The text that a token adds after others, spaces included; its id without a tokenizer.

    It is the token's own name where it completes no character, as for a part of one of several bytes.
    """
    if tokenizer is None:
        return str(token)
    context = list(before[-_CONTEXT:])
    shorter, longer = (
        str(tokenizer.decode(line, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for line in (context, [*context, token])
    )
    added = longer.removeprefix(shorter)
    if not added or "\ufffd" in added or not longer.startswith(shorter):
        return str(tokenizer.convert_ids_to_tokens(token))
    return added
