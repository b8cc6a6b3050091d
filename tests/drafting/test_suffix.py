"""SuffixDecoding and SAM-Decoding: drafts against naive searches of lists, and decoding against replay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from looped import looped
from tiny import cycle_base, family

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.interface import Proposer, SizeLimits
from treeopt.drafting.suffix import (
    DEPTH,
    GRID,
    PUBLISHED,
    SAM,
    SUFFIX,
    SuffixMethod,
    SuffixProposer,
    SuffixText,
    SuffixTrie,
    best_of_grid,
    steps_of,
)
from treeopt.errors import TreeoptError
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NODES, NEW = 8, 30
PROMPTS = [[5, 9, 5], [17], [3, 3, 40, 2, 7], [9, 5, 9]]
METHODS = [*GRID[SUFFIX][-4:], *GRID[SAM], PUBLISHED[SUFFIX]]

Path = tuple[int, ...]


def repeating(rng: random.Random, length: int) -> list[int]:
    """A text of few tokens that often repeats a part of itself, some parts longer than the trie is deep."""
    text = [rng.randrange(4) for _ in range(3)]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += text[start : start + rng.randrange(1, 2 * DEPTH)] if rng.random() < 0.6 else [rng.randrange(4)]
    return text[:length]


def ends_of(texts: Sequence[Sequence[int]], suffix: Sequence[int]) -> list[tuple[int, int]]:
    """The number of the text, and the place after each occurrence."""
    size = len(suffix)
    return [
        (i, end)
        for i, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(suffix)
    ]


def naive_tree(texts: Sequence[Sequence[int]], suffix: list[int], size: int, least: float) -> tuple[float, list[Path]]:
    """The paths of one suffix's tree, the likeliest first, by counting again for every node."""
    chances: dict[Path, float] = {(): 1.0}
    order: list[Path] = []  # that became candidates
    taken: list[Path] = [()]
    while True:
        parent = taken[-1]
        below = [*suffix, *parent]
        nexts = [texts[i][end] for i, end in ends_of(texts, below) if end < len(texts[i]) and len(below) < DEPTH]
        for token in dict.fromkeys(nexts):
            chance = chances[parent] * nexts.count(token) / len(nexts)
            if chance >= least:
                chances[*parent, token] = chance
                order.append((*parent, token))
        left = [path for path in order if path not in taken]
        if not left or len(taken) > size:
            return sum(chances[path] for path in taken[1:]), taken[1:]
        taken.append(max(left, key=lambda path: chances[path]))


def naive_paths(text: list[int], earlier: list[list[int]], method: SuffixMethod, most: int) -> list[Path]:
    """The drafts after a text, as paths."""
    searched = [[text], earlier]
    if method.name == SUFFIX:
        best: tuple[float, list[Path]] = (0.0, [])
        for texts in searched:
            for length in range(1, min(DEPTH, len(text)) + 1):
                found = naive_tree(texts, text[-length:], min(most, int(method.factor * length)), method.least)
                best = found if found[0] > best[0] + 1e-9 else best
        return best[1]
    matches = []
    for texts in searched:
        found_match: tuple[int, list[int]] = (0, [])
        for length in range(min(DEPTH, len(text)), 0, -1):
            ends = [(i, end) for i, end in ends_of(texts, text[-length:]) if texts[i] is not text or end < len(text)]
            if ends:
                i, end = ends[-1 if method.latest else 0]
                while length < min(end, len(text)) and texts[i][end - 1 - length] == text[-1 - length]:
                    length += 1
                found_match = (length, texts[i][end : end + most])
                break
        matches.append(found_match)
    (own, chain), (other, there) = matches
    chosen = there if other - method.bias > own or not own else chain
    return [tuple(chosen[: i + 1]) for i in range(len(chosen))]


@looped("method", METHODS)
def test_drafts_equal_a_naive_search(method: SuffixMethod) -> None:
    """On texts that repeat themselves and one another, at every place."""
    rng, drafted = random.Random(0), 0
    for _ in range(2):
        texts = [Text(str(i), repeating(rng, 5), repeating(rng, rng.randrange(20, 60))) for i in range(2)]
        earlier = [[*(text.prompt if method.prompts else ()), *text.answer] for text in texts]
        trie, whole = SuffixTrie().learn(texts, method), [*texts[0].answer[-DEPTH - 9 :], *repeating(rng, 25)]
        so_far = SuffixText(method, trie, whole[:3])
        for end in range(3, len(whole)):
            paths: list[Path] = [()]
            for token, parent, depth in so_far.draft(NODES, NODES):
                paths.append((*paths[parent], token))
                assert depth == len(paths[-1])
            assert paths[1:] == naive_paths(whole[:end], earlier, method, NODES), (whole[:end], earlier)
            drafted += len(paths) - 1
            so_far.add(whole[end : end + 1])
    assert drafted > 50


@pytest.fixture(scope="module")
def model() -> Base:
    """A model whose texts come back to what they had, but not always."""
    return cycle_base(disturbed=0.3)


def answers(base: Base, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Greedy answers of stock generate."""
    given = [Text(f"{i}", list(prompt), []) for i, prompt in enumerate(prompts)]
    return answer_all(base, given, AnswerOptions(max_new_tokens=NEW))[0]


def decoder_of(base: Base, method: SuffixMethod, texts: Sequence[Text], nodes: int = NODES) -> TreeDecoder:
    drafter = SuffixProposer(method, SuffixTrie().learn(texts, method))
    return TreeDecoder(base, None, TreePolicy(nodes, nodes - 1, method.name), drafter=drafter)


CASES = [(PUBLISHED[SUFFIX], 2), (PUBLISHED[SAM], 40), (GRID[SUFFIX][-1], 40), *((GRID[SAM][i], NODES) for i in (1, 2))]


@looped(("method", "nodes"), CASES)
def test_decoding_takes_the_replayed_steps(model: Base, method: SuffixMethod, nodes: int) -> None:
    """Alone and in a batch, whose rows end at different steps; the texts are those of stock generate."""
    earlier, texts = answers(model, [[9, 5, 9], [40, 2]]), answers(model, PROMPTS)
    decoder = decoder_of(model, method, earlier, nodes)
    expected = list(steps_of(texts, method, nodes, SuffixTrie().learn(earlier, method)))
    together = decoder.generate([text.prompt for text in texts], NEW)
    for text, steps, row in zip(texts, expected, together, strict=True):
        alone = decoder.generate(text.prompt, NEW)
        assert alone.tokens == row.tokens == text.answer
        assert len(alone.steps) == len(row.steps) == steps
        assert alone.draft_metrics == row.draft_metrics, "void nodes of smaller trees do not count"
    assert sum(expected) < sum(len(text.answer) for text in texts), "some drafts are accepted"


@pytest.mark.slow
def test_recurrent_models_take_the_replayed_steps() -> None:
    """Trees that are verified as paths."""
    base = family("qwen3_5_text")
    prompts = [[token % base.vocab_size for token in prompt] for prompt in PROMPTS]
    texts = answers(base, prompts)
    for method in (PUBLISHED[SUFFIX], PUBLISHED[SAM]):
        made = decoder_of(base, method, texts).generate(prompts, NEW)
        assert [one.tokens for one in made] == [text.answer for text in texts]
        known = SuffixTrie().learn(texts, method)
        assert [len(one.steps) for one in made] == list(steps_of(texts, method, NODES, known))


def test_removed_rows_and_rewound_texts(model: Base) -> None:
    """Rows that are left take the steps that they take alone; after `rewind` the same steps follow."""
    texts = answers(model, PROMPTS)
    decoder = decoder_of(model, PUBLISHED[SUFFIX], texts[:1])
    alone = [[list(step) for step in decoder.generate(prompt, NEW).steps] for prompt in PROMPTS]
    rows = decoder.prefill(PROMPTS, NEW)
    assert [list(step) for step in decoder.step(rows)] == [steps[0] for steps in alone]
    rows.keep([1, 3])
    mark = rows.mark()
    first = [[list(step) for step in decoder.step(rows)] for _ in range(4)]
    assert first == [[alone[1][i], alone[3][i]] for i in range(1, 5)]
    rows.rewind(mark)
    assert [[list(step) for step in decoder.step(rows)] for _ in range(4)] == first


def test_replay_learns_the_texts_before() -> None:
    """Without known texts each one is searched for in those before; the prompt too, where prompts are learned."""
    texts = [Text("0", [1, 2, 3], [4, 5, 6, 7]), Text("1", [9, 4], [5, 6, 7, 8]), Text("2", [1], [2, 3, 4, 5])]
    answered, whole = SuffixMethod(SUFFIX), SuffixMethod(SUFFIX, prompts=True)
    assert list(steps_of(texts, answered, NODES)) == [4, 2, 3]
    assert list(steps_of(texts, whole, NODES)) == [4, 2, 2]
    none = SuffixTrie()
    assert list(steps_of(texts, whole, NODES, none)) == [4, 4, 4]
    assert none.tokens == [-1]


def test_grid_has_the_published_settings_and_its_best_is_chosen() -> None:
    """The settings with the fewest steps, the first of equal ones; each is a progress note."""
    notes: list[str] = []
    texts = [Text("0", [1, 2, 3], [4, 5, 6, 7]), Text("1", [1], [2, 3, 4, 5])]
    best = best_of_grid(SUFFIX, texts, NODES, lambda done, total, note: notes.append(f"{done}/{total} {note}"))
    assert best == SuffixMethod(SUFFIX, 2.0, 0.0, prompts=True)
    assert notes[0] == "1/12 factor 1, least 0, earlier answers: 1.143 tokens per step"
    assert len(notes) == 12
    assert all(one in GRID[name] for name, one in PUBLISHED.items())
    assert SuffixMethod(SAM, bias=0, latest=True).shown("from 3") == "bias 0, latest place, from 3 answers"


def test_static_trees_path_tokens_and_traces_are_refused(model: Base) -> None:
    """Each is an error that names the method."""
    proposer = SuffixProposer(PUBLISHED[SAM], SuffixTrie())
    assert isinstance(proposer, Proposer)
    session = proposer.start([[5]], 2)
    none = torch.zeros(1, dtype=torch.long), torch.zeros(1, model.hidden_size)
    for call in (
        lambda: TreeDecoder(model, None, Tree.chain(2), drafter=proposer).generate([5], 4),
        lambda: session.grow(*none, SizeLimits((4,), (0.0,), 2, path_tokens=True)),
        lambda: proposer.start([[5, 6]], 2, [[1, 2]]),
    ):
        with pytest.raises(TreeoptError, match="SAM-Decoding cannot be") as caught:
            call()
        assert caught.value.code.number == "E223"
