"""Token Recycling: drafts, updates and texts against a naive version in plain Python."""

from __future__ import annotations

import pytest
import torch
from looped import looped
from tiny import tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.interface import Proposer, SizeLimits
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.errors import TreeoptError
from treeopt.files.trees import load_tree
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

NEW = 40
PROMPTS = ([5, 9, 5], [17], [3, 3, 40, 2])
TREE = Tree.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])

Rows = dict[int, list[int]]


def successors(base: Base, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens after a text; of equal logits the smaller id first."""
    with torch.no_grad():
        logits = base.forward(torch.tensor([ids]), use_cache=False)[0][0, -1].tolist()
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]


def naive_text(base: Base, prompt: list[int], rows: Rows, tree: Tree, new: int) -> list[list[int]]:
    """The steps of one text, a forward for each node; `rows` holds the matrix and is changed.

    Row of a token -> its successors; a token without a row has successors 0, 1, ...
    """
    count = 8
    text, steps, written = list(prompt), [], 0
    root = successors(base, text, 1)[0]
    while written < new:
        if written == new - 1:  # the last token needs no forward
            return [*steps, [root]]
        drafts: dict[tuple[int, ...], list[int]] = {(): [root]}  # path of ranks -> tokens of the path
        for path in tree.paths:
            above = drafts[path[:-1]]
            drafts[path] = [*above, rows.get(above[-1], list(range(count)))[path[-1]]]
        after = {path: successors(base, text + tokens, count) for path, tokens in drafts.items()}
        accepted: tuple[int, ...] = ()
        while True:
            following = [p for p in tree.paths if p[:-1] == accepted and drafts[p][-1] == after[accepted][0]]
            if not following:
                break
            accepted = following[0]
        on_path = [path == accepted[: len(path)] for path in ((), *tree.paths)]
        for kept in (False, True):  # accepted nodes overwrite the others; sorted by depth, deeper ones those above
            for path, is_kept in zip(((), *tree.paths), on_path, strict=True):
                if is_kept is kept:
                    rows[drafts[path][-1]] = after[path]
        step = drafts[accepted]
        text += step
        root = after[accepted][0]
        steps.append(step[: new - written])
        written += len(steps[-1])
    return steps


def as_rows(drafter: TokenRecycling) -> list[list[int]]:
    """The matrix of a drafter."""
    rows: list[list[int]] = drafter.matrix.tolist()
    return rows


@pytest.mark.slow
@looped("tree", [TREE, Tree.chain(3)])
def test_steps_and_matrix_equal_the_naive_version(tree: Tree) -> None:
    """Several texts in turn take the naive version's steps, and leave its matrix for the next text."""
    base = tiny_base("llama")
    drafter = TokenRecycling(base)
    decoder = TreeDecoder(base, None, tree, drafter=drafter)
    rows: Rows = {}
    for prompt in PROMPTS:
        steps = [list(step) for step in decoder.start(prompt, NEW)]
        assert steps == naive_text(base, list(prompt), rows, tree, NEW)
        assert as_rows(drafter) == [rows.get(token, list(range(8))) for token in range(base.vocab_size)]
    assert any(len(step) > 2 for step in steps), "some drafts of two levels are accepted"


def test_text_is_that_of_plain_greedy_generate(base: Base) -> None:
    """On a real model, 81 nodes draft from what earlier texts left, and no token of the text changes."""
    drafter = TokenRecycling(base)
    decoder = TreeDecoder(base, None, load_tree("token_recycling"), drafter=drafter)
    assert base.tokenizer is not None
    lengths = []
    for opening in ("Once upon a time", "One day a girl", "Once upon a time there was a dog"):
        ids = base.tokenizer(opening, return_tensors="pt")["input_ids"]
        decoded = decoder.generate(ids, 80)
        plain = base.generate(ids, torch.ones_like(ids), 80)[0, ids.shape[1] :].tolist()
        assert decoded.tokens == plain
        lengths.append(len(decoded.step_lengths))
    assert lengths[-1] < 80 / 1.8


def test_batch_gives_the_texts_of_rows_alone() -> None:
    """Rows of a batch share the matrix, so their steps differ from those of rows alone; their texts do not."""
    base = tiny_base("llama")
    drafter = TokenRecycling(base)
    together = TreeDecoder(base, None, TREE, drafter=drafter).generate([list(p) for p in PROMPTS], NEW)
    plain = TreeDecoder(base, None, Tree(()))
    assert [one.tokens for one in together] == [plain.generate(list(p), NEW).tokens for p in PROMPTS]
    assert sum(len(one.step_lengths) for one in together) < 3 * NEW


def test_of_equal_tokens_the_last_accepted_one_is_stored() -> None:
    """A token at several nodes of a step gets the successors after its last accepted node, else after its last one."""
    drafter = TokenRecycling(tiny_base("llama"), successors=2)
    tokens, accepted = torch.tensor([7, 3, 7, 3, 7, 4]), torch.tensor([1, 0, 1, 0, 0, 0])
    drafter.store(tokens, torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]), accepted)
    assert [as_rows(drafter)[token] for token in (7, 3, 4, 5)] == [[5, 6], [7, 8], [11, 12], [0, 1]]


def test_rewound_text_is_drafted_again() -> None:
    """A mark holds the matrix: after `rewind` the same steps follow."""
    base = tiny_base("llama")
    decoder = TreeDecoder(base, None, TREE, drafter=TokenRecycling(base))
    rows = decoder.prefill([[5, 9, 5]], NEW)
    decoder.step(rows)
    mark = rows.mark()
    first = [decoder.step(rows) for _ in range(6)]
    rows.rewind(mark)
    assert [decoder.step(rows) for _ in range(6)] == first


def test_vocabulary_below_eight_has_fewer_successors() -> None:
    """A model of five tokens has five successors of each, and refuses a rank above."""
    base = tiny_base("llama", vocab_size=5)
    drafter = TokenRecycling(base)
    assert (drafter.num_candidates, drafter.matrix.shape) == (5, (5, 5))
    with pytest.raises(TreeoptError, match="rank 5"):
        TreeDecoder(base, None, load_tree("token_recycling"), drafter=drafter)


def test_trees_per_step_and_traces_are_refused() -> None:
    """What needs probabilities, or the matrix before a past position, is an error that says so."""
    base = tiny_base("llama")
    drafter = TokenRecycling(base)
    assert isinstance(drafter, Proposer)
    session = drafter.start([[5]], 2)
    none = torch.zeros(1, dtype=torch.long), torch.zeros(1, base.hidden_size)
    for call in (
        lambda: TreeDecoder(base, None, TreePolicy(8, 3, "x"), drafter=drafter).generate([5], 4),
        lambda: session.grow(*none, SizeLimits((4,), (0.0,), 2)),
        lambda: session.expand(4, 2),
        lambda: session.trace(torch.zeros(1, 2, dtype=torch.long).numpy()),
        lambda: session.features(torch.zeros(1, 2, dtype=torch.long).numpy()),
        lambda: drafter.start([[5, 6]], 2, [[1, 2]]),
    ):
        with pytest.raises(TreeoptError, match="token recycling") as caught:
            call()
        assert caught.value.code.number == "E223"
