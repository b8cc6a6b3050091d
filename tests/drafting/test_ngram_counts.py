"""N-gram tables, against counts in dicts and the recursion of interpolated absolute discounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from naive_draft import CONTEXT, naive_key

import treeopt.drafting.count as module
from treeopt.drafting.count import MAX_BYTES, NgramCounts
from treeopt.ngram_table import NgramTable

DISCOUNT = 0.75
Text = tuple[list[int], list[int]]  # tokens, and what followed each
Context = tuple[int, ...]


class Naive:
    """The same estimate, one probability at a time."""

    def __init__(self, texts: Sequence[Text], vocab: int) -> None:
        self.vocab = vocab
        self.unigram: Counter[int] = Counter()
        self.after: dict[Context, Counter[int]] = {}
        for tokens, successors in texts:
            for at, successor in enumerate(successors):
                self.unigram[successor] += 1
                for length in range(1, min(CONTEXT, at + 1) + 1):
                    self.after.setdefault(tuple(tokens[at + 1 - length : at + 1]), Counter())[successor] += 1

    def frequency(self, token: int) -> float:
        """U: one token more than were seen, spread over all."""
        return (self.unigram[token] + 1 / self.vocab) / (self.unigram.total() + 1)

    def probability(self, context: Context, token: int) -> float:
        """P(token | context)."""
        if not context:
            return self.frequency(token)
        shorter = self.probability(context[1:], token)
        if context not in self.after:
            return shorter
        counts = self.after[context]
        own = max(counts[token] - DISCOUNT, 0.0)
        return (own + DISCOUNT * len(counts) * shorter) / counts.total()


def random_texts(seed: int, vocab: int, *, texts: int = 6, length: int = 60) -> list[Text]:
    """Texts with a habit: mostly the same token follows the same one; some are empty or shorter than a context."""
    rng = np.random.default_rng(seed)
    habit = rng.integers(vocab, size=vocab)
    made = []
    for size in [0, 1, 3, *rng.integers(4, length + 1, texts)]:
        tokens = [int(rng.integers(vocab))]
        for _ in range(int(size)):
            tokens.append(int(habit[tokens[-1]] if rng.random() < 0.6 else rng.integers(vocab)))
        made.append((tokens[:-1], tokens[1:]))
    return made


def counted(texts: Sequence[Text], vocab: int) -> NgramCounts:
    """All texts in one counter."""
    counts = NgramCounts(vocab)
    for tokens, successors in texts:
        counts.add(tokens, successors)
    return counts


def same(one: NgramTable, other: NgramTable) -> bool:
    """Bit for bit."""
    pairs = zip(one.arrays().values(), other.arrays().values(), strict=True)
    return one.num_tokens == other.num_tokens and all(
        a.tobytes() == b.tobytes() and a.shape == b.shape for a, b in pairs
    )


def rows_of(table: NgramTable, contexts: Sequence[Context]) -> dict[Context, int]:
    """Row of each stored context."""
    place = {int(key): row for row, key in enumerate(table.keys, start=1)}
    return {c: place[naive_key(c)] for c in contexts if naive_key(c) in place} | {(): 0}


def ratio_of(table: NgramTable, row: int, token: int) -> float:
    """As the record says: from the row, or its backoff."""
    held = table.tokens[row].tolist()
    return float(table.ratios[row, held.index(token)] if token in held else table.backoff[row])


def rounding(value: float) -> float:
    """Most that float16 may be off, and sums in float32."""
    return abs(value) * 2.0**-11 + 1e-5


@looped("vocab", [1, 2, 8, 40])
@looped("seed", range(2))
def test_probabilities_equal_the_recursion(vocab: int, seed: int) -> None:
    """Every seen context is stored, and every token's probability after it is as counted in dicts."""
    texts = random_texts(seed, vocab)
    naive = Naive(texts, vocab)
    table = counted(texts, vocab).table(row=vocab)
    assert table.num_tokens == naive.unigram.total()
    assert sorted(table.keys.tolist()) == sorted(map(naive_key, naive.after))
    for token in range(vocab):
        wanted = math.log(naive.frequency(token))
        assert float(table.unigram[token]) == pytest.approx(wanted, abs=rounding(wanted))
    for context, row in rows_of(table, list(naive.after)).items():
        for token in range(vocab):
            wanted = math.log(naive.probability(context, token) / naive.frequency(token))
            assert ratio_of(table, row, token) == pytest.approx(wanted, abs=rounding(wanted))


def test_one_text_by_hand() -> None:
    """0 1 0 1 0 -> 1: after 0 came 1 three times, so P(1 | 0) = (3 - 0.75 + 0.75 U(1)) / 3, U(1) = (3 + 1/2) / 6."""
    table = counted([([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])], 2).table()
    assert table.num_tokens == 5
    assert table.tokens[0].tolist() == [1, 0]
    row = rows_of(table, [(0,)])[(0,)]
    assert table.tokens[row].tolist() == [1, 0]
    # (2.25 + 0.75 * 0.58333) / 3 = 0.89583; / U(1) = 1.53571; P(0 | 0) / U(0) = 0.25
    assert np.exp(table.ratios[row].astype(float)).tolist() == pytest.approx([1.53571, 0.25], rel=1e-3)
    assert math.exp(float(table.backoff[row])) == pytest.approx(0.25, rel=1e-3)


@looped("seed", range(4))
def test_rows_hold_the_likeliest_of_different_tokens(seed: int) -> None:
    """Of a context's own commonest and the shorter context's row, each row keeps the likeliest, in their order."""
    vocab, width = 30, 5
    texts = random_texts(seed, vocab)
    naive = Naive(texts, vocab)
    table = counted(texts, vocab).table(row=width)
    places = rows_of(table, list(naive.after))
    prior = [math.log(naive.frequency(token)) for token in range(vocab)]
    for context, row in places.items():
        tokens = table.tokens[row].tolist()
        assert len(set(tokens)) == width
        if not context:
            assert tokens == sorted(range(vocab), key=lambda token: (-prior[token], token))[:width]
            assert table.ratios[row].tolist() == [0] * width
            continue
        counts, above = naive.after[context], places[context[1:]]
        free = math.log(DISCOUNT * len(counts) / counts.total())
        assert float(table.backoff[row]) == pytest.approx(float(table.backoff[above]) + free, abs=0.01)
        own = sorted(counts, key=lambda token: (-counts[token], token))[:width]
        likely = {}
        for token in dict.fromkeys([*own, *table.tokens[above].tolist()]):
            mass = (counts[token] - DISCOUNT) / counts.total() / math.exp(prior[token]) if token in own else 0.0
            likely[token] = prior[token] + math.log(mass + math.exp(free + ratio_of(table, above, token)))
        wanted = sorted(likely.values(), reverse=True)[:width]
        found = [prior[token] + float(table.ratios[row, place]) for place, token in enumerate(tokens)]
        assert found == pytest.approx(wanted, abs=0.02)
        assert [likely[token] for token in tokens] == pytest.approx(wanted, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_split_and_grouping_gives_the_same_table(data: st.DataObject) -> None:
    """Texts counted in several counters, merged in any order and grouping, are as counted in one."""
    vocab = data.draw(st.sampled_from([1, 2, 8]))
    texts = random_texts(data.draw(st.integers(0, 5)), vocab, texts=4, length=20)
    whole = counted(texts, vocab)
    shuffled = data.draw(st.permutations(texts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=4)))
    parts = [counted(shuffled[a:b], vocab) for a, b in zip([0, *cuts], [*cuts, len(texts)], strict=True)]
    while len(parts) > 1:
        some = data.draw(st.integers(2, len(parts)))
        parts = [*parts[some:], parts[0].merged(parts[1:some])]
    row, limit = data.draw(st.sampled_from([1, 2, 16])), data.draw(st.sampled_from([200, 1000, MAX_BYTES]))
    assert same(parts[0].merged([]).table(row=row, max_bytes=limit), whole.table(row=row, max_bytes=limit))


def test_pieces_are_joined_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often counts are joined, and how many rows are worked on at once, changes nothing."""
    texts = random_texts(7, 8)
    whole = counted(texts, 8).table(row=4)
    monkeypatch.setattr(module, "_PIECE", 10)
    monkeypatch.setattr(module, "_CHUNK", 3)
    assert same(counted(texts, 8).table(row=4), whole)


def test_merged_needs_one_vocabulary() -> None:
    """Counts of another vocabulary are not spread over this one."""
    with pytest.raises(AssertionError):
        NgramCounts(8).merged([NgramCounts(1)])


def test_successor_may_differ_from_the_text() -> None:
    """A model's own choice is counted, not what the text went on with."""
    table = counted([([1, 2], [7, 6])], 8).table(row=1)
    places = rows_of(table, [(1,), (2,), (1, 2)])
    assert [int(table.tokens[places[c], 0]) for c in [(1,), (2,), (1, 2)]] == [7, 6, 6]


@looped("vocab", [1, 2, 8, 512, 150_000])
def test_no_text_at_all(vocab: int) -> None:
    """The table of nothing has one row, and every token is as frequent as another."""
    for counts in (NgramCounts(vocab), counted([([], [])], vocab), NgramCounts(vocab).merged([])):
        table = counts.table()
        assert (table.contexts, table.num_tokens, table.vocab_size) == (0, 0, vocab)
        assert set(table.unigram.tolist()) == {float(np.float16(-math.log(vocab)))}
        assert table.tokens.tolist() == [list(range(min(vocab, 16)))]
        assert not table.ratios.any()
        assert not table.backoff.any()


@looped("vocab", [1, 2, 512])
def test_one_token_ever_seen(vocab: int) -> None:
    """Where one token is all that came, it is the likeliest everywhere."""
    table = counted([([0] * 50, [0] * 50)], vocab).table()
    assert table.keys.tolist() == [naive_key((0,) * length) for length in range(1, 5)]
    assert table.tokens[:, 0].tolist() == [0] * 5
    assert float(table.unigram[0]) == pytest.approx(math.log((50 + 1 / vocab) / 51), abs=1e-4)


def test_successor_outside_the_vocabulary_is_refused() -> None:
    """A token that the vocabulary does not have is not counted, nor is half of its text."""
    counts = NgramCounts(4)
    with pytest.raises(ValueError, match="broadcast"):
        counts.add([1, 2], [2, 4])
    assert counts.unigram.sum() == 0


@looped("limit", [0, 100, 400, 1000, 3000, 6000])
@looped("seed", range(2))
def test_prune_keeps_the_most_frequent(seed: int, limit: int) -> None:
    """As many contexts as fit; none that is dropped is more frequent, and what is kept can back off step by step."""
    vocab = 8
    texts = random_texts(seed, vocab)
    naive = Naive(texts, vocab)
    table = counted(texts, vocab).table(row=vocab, max_bytes=limit)
    kept = set(rows_of(table, list(naive.after))) - {()}
    dropped = set(naive.after) - kept
    assert table.contexts == len(kept)
    one = 10 + 6 * vocab  # bytes of a context
    least = 2 + 8 * vocab  # of row 0 and the frequencies, which always stay
    assert table.bytes <= max(limit, least)
    assert not dropped or table.bytes + 2 * one > limit
    assert {context[1:] for context in kept} <= kept | {()}
    if kept and dropped:
        worst = min((naive.after[c].total(), -len(c)) for c in kept)
        assert worst >= max((naive.after[c].total(), -len(c)) for c in dropped)
    for context, row in rows_of(table, list(kept)).items():
        for token in range(vocab):
            wanted = math.log(naive.probability(context, token) / naive.frequency(token))
            assert ratio_of(table, row, token) == pytest.approx(wanted, abs=rounding(wanted))


@looped("vocab", [512, 150_000])
def test_large_tables_stay_within_their_bytes(vocab: int) -> None:
    """Texts of more contexts than fit, of small and large vocabularies."""
    rng = np.random.default_rng(vocab)
    tokens = np.minimum(rng.zipf(1.3, 60_001) - 1, vocab - 1)
    counts = NgramCounts(vocab)
    counts.add(tokens[:-1], tokens[1:])
    table = counts.table(max_bytes=2 << 20)
    assert (2 << 20) - 300 < table.bytes <= 2 << 20
    rows = np.sort(table.tokens, axis=1)
    assert (rows[:, 1:] > rows[:, :-1]).all()
    likely = table.ratios.astype(np.float32) + table.unigram.astype(np.float32)[table.tokens]
    assert (np.diff(likely, axis=1) < 0.05).all()  # float16 of numbers up to 20


@pytest.mark.slow
def test_default_limit_of_a_large_vocabulary() -> None:
    """More contexts than 64 MB hold, of 150,000 tokens, fill these and no more."""
    tokens = np.random.default_rng(0).integers(150_000, size=180_001)
    counts = NgramCounts(150_000)
    counts.add(tokens[:-1], tokens[1:])
    table = counts.table()
    assert 64_000_000 - 300 < table.bytes <= 64_000_000
    assert table.bytes == sum(array.nbytes for array in table.arrays().values())
