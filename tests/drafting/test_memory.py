"""The memory across texts: its matches against lists and loops, its bounds, its file, and threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_scorer import Scorer
from looped import looped
from naive_draft import empty_table, naive_key

from treeopt.drafter import Drafter, Level
from treeopt.drafting.interface import Features
from treeopt.drafting.kernel.data import CACHE, RECALLED
from treeopt.drafting.kernel.memory import token_after
from treeopt.drafting.kernel.nodes import begin_row, matches
from treeopt.drafting.memory import MAX_BYTES, Memory, load_memory
from treeopt.errors import Code, TreeoptError
from treeopt.files.tensors import read_arrays, write_arrays

VOCAB, DEPTH = 4, 3
BYTES = 1 << 12


def scorer_of(memory: Memory | None, vocab: int = VOCAB) -> Scorer:
    """The kernel with a drafter without heads, all of whose candidates come from text and memory."""
    return Scorer(Drafter((Level(),) * DEPTH, 0, 0, 64, empty_table(vocab)[1], voted=vocab), memory)


def kernel_at(memory: Memory | None, text: Sequence[int], path: Sequence[int], vocab: int = VOCAB) -> Any:
    """The kernel with a path below the end of a text."""
    step = scorer_of(memory, vocab).begin(torch.zeros(0, 1, vocab), np.array([text]), DEPTH)
    kernel = step.session.kernel(step.session.working(1)[0])
    begin_row(kernel, 0)
    kernel.work.path[: len(path)] = path
    return kernel


class NaiveMemory:
    """The same rules over one list of all tokens that were ever added, -1 after each text."""

    def __init__(self, memory: Memory) -> None:
        self.size, self.bits = len(memory.arrays.tokens), memory.arrays.bits
        self.tokens: list[int] = []
        self.slots: dict[int, int] = {}  # by place

    def add(self, text: Sequence[int]) -> None:
        for i, token in enumerate(text):
            if i >= 3:
                key = naive_key(tuple(text[i - 3 : i + 1])) % (1 << 60)
                self.slots[len(self.tokens)] = key >> (60 - self.bits)
            self.tokens.append(token)
        self.tokens.append(-1)

    def matches(self, text: Sequence[int], path: Sequence[int]) -> list[tuple[int, int]]:
        """The place in the ring, and the length that counts, of each match of text and path, the latest first."""
        if len(text) < 4:
            return []
        slot = (naive_key(tuple(text[-4:])) % (1 << 60)) >> (60 - self.bits)
        first = max(0, len(self.tokens) - self.size)
        places = [place for place, one in self.slots.items() if one == slot and place >= first]
        found = []
        for place in sorted(places, reverse=True)[:RECALLED]:
            length, end = 0, place + len(path)
            while (
                length < min(len(text), 24)
                and place - length >= first
                and self.tokens[place - length] == text[-1 - length]
            ):
                length += 1
            followed = self.tokens[place + 1 : end + 1] == list(path)
            if length >= 4 and length + len(path) >= 6 and followed and self.tokens[end + 1] >= 0:
                found.append((end % self.size, (length + len(path)) // 2))
        return found


@looped("seed", range(6))
def test_matches_are_those_of_loops(seed: int) -> None:
    """For random texts that repeat, paths of every depth, and a ring that is written over several times."""
    rng = np.random.default_rng(seed)
    memory = Memory(BYTES)
    naive, compared = NaiveMemory(memory), 0
    phrases = [rng.integers(VOCAB, size=rng.integers(6, 40)).tolist() for _ in range(4)]
    for _ in range(60):
        text = [token for _ in range(rng.integers(0, 3)) for token in phrases[rng.integers(4)]]
        memory.add(text)
        naive.add(text)
        phrase = phrases[rng.integers(4)]
        cut = int(rng.integers(1, len(phrase) - DEPTH + 1))
        depth = int(rng.integers(DEPTH))
        path = phrase[cut : cut + depth]
        kernel = kernel_at(memory, phrase[:cut], path)
        found, longest, best = matches(kernel, 0, depth)
        pairs = list(zip(kernel.work.places[:found].tolist(), kernel.work.lengths[:found].tolist(), strict=True))
        recalled = [(-1 - place, length) for place, length in pairs if place < 0]
        assert recalled == naive.matches(phrase[:cut], path)
        own = max((length for place, length in pairs if place >= 0), default=0)
        assert longest == max([own, *(length for _, length in recalled)])
        assert (best < 0) == (longest > own)
        compared += len(recalled)
    assert compared > 100
    assert len(naive.tokens) > 3 * naive.size


def features_of(memory: Memory | None, text: Sequence[int], vocab: int) -> Features:
    """Features below the root of one text."""
    scorer = scorer_of(memory, vocab)
    step = scorer.begin(torch.zeros(0, 1, vocab), np.array([text]), DEPTH)
    return scorer.features(step, step.root)


def test_a_match_counts_as_one_of_half_its_length() -> None:
    """Ten last tokens in the memory vote, and look up, as five in the text so far; their token is a candidate."""
    last, after, others = list(range(10)), 10, list(range(20, 40))
    memory = Memory()
    memory.add([*others, *last, after, 11])
    [within, beside] = (
        features_of(memory, [*others[:12], *last], 50),
        features_of(None, [12, *last[5:], after, *others[:7], 15, *last[:5], 14, *last[5:]], 50),
    )
    assert (
        (within.length.tolist(), within.found.tolist()) == (beside.length.tolist(), beside.found.tolist()) == ([5], [4])
    )
    for found in (within, beside):
        assert found.tokens[0, found.looked_up[0]] == after
    share = [float(one.terms[CACHE, 0, one.looked_up[0]]) for one in (within, beside)]
    assert share[0] > 0
    assert features_of(Memory(), [*others[:12], *last], 50).length.tolist() == [0]


def test_short_matches_and_ends_do_not_count() -> None:
    """Five tokens are too few, the end of a text has no token after it, and no match crosses it."""
    memory = Memory()
    memory.add([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13])
    for text, count in (([2, 3, 4, 5, 6], 0), ([1, 2, 3, 4, 5, 6], 0), ([7, 8, 9, 10, 11], 0), (range(7, 13), 1)):
        assert matches(kernel_at(memory, list(text), [], 20), 0, 0)[0] == count
    assert matches(kernel_at(memory, [4, 5, 6, 7, 8, 9], [], 20), 0, 0)[0] == 0


def test_memory_stays_within_its_bytes() -> None:
    """Also the default; the oldest tokens go first, and texts come back as they were added."""
    for most in (BYTES, 1 << 16, 99_999, MAX_BYTES):
        arrays = Memory(most).arrays
        assert most * 0.8 < sum(array.nbytes for array in arrays[:3]) <= most
    memory = Memory(BYTES)
    texts = [list(range(start, start + 100)) for start in range(0, 1000, 100)]
    for text in texts:
        memory.add(text)
    size = len(memory.arrays.tokens)
    kept = memory.texts()
    assert memory.num_tokens == size
    assert [one.tolist() for one in kept[1:]] == texts[-3:]
    assert kept[0].tolist() == texts[-4][-(size - 3 * 101 - 1) :]


def test_merge_copy_clear() -> None:
    """A merge adds the other's texts as later ones, a copy is its own, and nothing is left after a clear."""
    one, other = Memory(BYTES), Memory(BYTES)
    one.add([1, 2, 3])
    other.add([4, 5], [])
    one.merge(other)
    copy = one.copy()
    one.merge(one)
    assert [text.tolist() for text in one.texts()] == [[1, 2, 3], [4, 5], []] * 2
    assert copy.id != one.id
    one.clear()
    assert (one.num_tokens, one.texts()) == (0, [])
    assert [text.tolist() for text in copy.texts()] == [[1, 2, 3], [4, 5], []]


@looped("most", [0, (1 << 12) - 1, 12 << 31, -5, 1e6, "a", True])
def test_bytes_out_of_range(most: Any) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        Memory(most)


def test_vocabularies_do_not_mix() -> None:
    """The first decoder's vocabulary stays; tokens outside it are refused, and nothing of their texts is stored."""
    memory = Memory(BYTES)
    memory.fit(8, "the model")
    with pytest.raises(ValueError, match="outside the vocabulary of 8"):
        memory.add([1, 2], [8])
    with pytest.raises(ValueError, match="outside"):
        memory.add([-1])
    assert memory.num_tokens == 0
    early = Memory(BYTES)
    early.add([1, 8])
    with pytest.raises(TreeoptError, match="E223"):
        early.fit(8, "the model")
    early.fit(9, "the model")
    other = Memory(BYTES)
    other.fit(9, "another")
    with pytest.raises(TreeoptError, match="E223"):
        memory.merge(other)


@looped("text", [[[1, 2]], [1.5], [True], ["3"], [1 << 70], torch.tensor([[1, 2]]), 5])
def test_what_is_no_text_is_refused(text: Any) -> None:
    """A row of a batch, other numbers and strings; integers of any kind are taken."""
    memory = Memory(np.int64(BYTES))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a text is token ids"):
        memory.add([1], text)
    assert memory.num_tokens == 0
    memory.add((1, 2), torch.tensor([3]), np.array([4], np.uint8))
    assert [one.tolist() for one in memory.texts()] == [[1, 2], [3], [4]]


@looped("texts", [[], [[0]], [[5, 6], []]])
def test_memory_of_no_decoder_is_kept(texts: list[list[int]], tmp_path: Path) -> None:
    """It has no vocabulary yet, in its file either."""
    memory = Memory(BYTES)
    memory.add(*texts)
    memory.save(tmp_path / "m")
    assert [one.tolist() for one in load_memory(tmp_path / "m").texts()] == texts


def test_file_gives_the_same_memory(tmp_path: Path) -> None:
    """Also of a ring that was written over; an existing file stays unless it is to be overwritten."""
    memory = Memory(BYTES)
    memory.fit(VOCAB, "the model")
    rng = np.random.default_rng(0)
    for _ in range(30):
        memory.add(rng.integers(VOCAB, size=50))
    memory.save(tmp_path / "m")
    with pytest.raises(TreeoptError, match="E202"):
        memory.save(tmp_path / "m")
    found = load_memory(tmp_path / "m")
    assert (found.id, found.vocab_size, found.max_bytes) == (memory.id, VOCAB, BYTES)
    text = rng.integers(VOCAB, size=12).tolist()
    for one in (memory, found):
        one.add([0, *text, 1])
    counts = [matches(kernel_at(one, text, []), 0, 0)[0] for one in (memory, found)]
    assert counts[0] == counts[1] > 0
    found.save(tmp_path / "m", overwrite=True)


@looped(
    "changed",
    [
        {"tokens": np.array([1, VOCAB, -1], np.int32)},
        {"tokens": np.array([1, -2, -1], np.int32)},
        {"tokens": np.array([1, 2], np.int32)},
        {"tokens": np.array([[1, -1]], np.int32)},
        {"tokens": np.array([1, -1], np.int64)},
        {"tokens": np.zeros(4000, np.int32) - 1},
        {"other": np.array([1, -1], np.int32)},
        {"tokens": np.array([-1], np.int32), "more": np.array([-1], np.int32)},
        {"max_bytes": 5},
        {"max_bytes": "many"},
        {"vocab_size": -1},
        {"unknown": 1},
    ],
)
def test_wrong_files_are_one_error(changed: dict[str, Any], tmp_path: Path) -> None:
    """E203, which names the file."""
    memory = Memory(BYTES)
    memory.fit(VOCAB, "the model")
    memory.add([1, 2])
    memory.save(tmp_path / "good", overwrite=True)
    arrays, header = read_arrays(tmp_path / "good", "treeopt.memory/1")
    given = {name: value for name, value in changed.items() if isinstance(value, np.ndarray)}
    header |= {name: value for name, value in changed.items() if name not in given}
    write_arrays(tmp_path / "wrong", given or arrays, header, overwrite=True)
    with pytest.raises(TreeoptError, match="wrong") as error:
        load_memory(tmp_path / "wrong")
    assert error.value.code is Code.FILE_INVALID
    with pytest.raises(TreeoptError, match="E201"):
        load_memory(tmp_path / "none")


def test_token_that_was_overwritten_meanwhile_is_a_token() -> None:
    """A place whose text a thread has just ended gives token 0, and no index outside of arrays."""
    memory = Memory(BYTES)
    memory.add([1, 2, 3])
    kernel = kernel_at(memory, [1, 2, 3], [])
    assert [token_after(kernel, 0, -1 - place) for place in range(3)] == [2, 3, 0]


def test_threads_share_a_memory() -> None:
    """Threads that add and search at once: every text is stored whole, and searches read no other memory."""
    memory, rng = Memory(BYTES), np.random.default_rng(0)
    texts = [rng.integers(VOCAB, size=40).tolist() for _ in range(8)]
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(50):
                memory.add(texts[number])
                found, longest, _ = matches(kernel_at(memory, texts[number][:30], []), 0, 0)
                assert found <= 30 + RECALLED
                assert longest <= 30
                tokens = features_of(memory, texts[number][:30], VOCAB).tokens
                assert 0 <= tokens.min() <= tokens.max() < VOCAB
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert memory.arrays.end[0] == 4 * 50 * 41
    assert {tuple(text.tolist()) for text in memory.texts()[1:]} <= {tuple(text) for text in texts}
