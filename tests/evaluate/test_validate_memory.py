"""Streams with a memory: lossless, and predicted exactly, alone and in batches, for each kind of drafter."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import answered, planted, prompts_of, quick_drafter
from looped import looped
from program import error_of, treeopt, treeopt_json
from refusals import refusal_of
from tiny import but_slow, tiny_base

import treeopt as library
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample, Typical
from treeopt.defaults import HEADS_NGRAM, MODEL, NGRAM
from treeopt.drafter import Drafter
from treeopt.drafting.memory import Memory, load_memory
from treeopt.drafting.plans import proposer_for
from treeopt.errors import Code
from treeopt.evaluate.validate import validate
from treeopt.models.base import Base, load_base
from treeopt.policy import TreePolicy
from treeopt.runs.lock import Lock
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 14


def stream(base: Base, count: int = 3) -> list[Text]:
    """Prompts that come back: as they were, and with another token at their end or their start."""
    first = prompts_of(5, count, vocab=base.vocab_size)
    changed = [[*text.prompt[:-1], text.prompt[-1] ^ 1] for text in first]
    later = [[text.prompt[0] ^ 1, *text.prompt[1:]] for text in first]
    prompts = [*(text.prompt for text in first), *changed, *(text.prompt for text in first), *later]
    return [Text(f"set:{i:08}", prompt, []) for i, prompt in enumerate(prompts)]


def setting(kind: str) -> tuple[Base, Any, Drafter, Base | None]:
    """A random model and a drafter of a kind; only that of the heads was learned."""
    if kind == HEADS_NGRAM:
        base, heads = planted(3)
        return base, heads, quick_drafter(base, heads), None
    base, draft = tiny_base("llama", 7), tiny_base("llama", 8) if kind == MODEL else None
    drafter = Drafter.untrained(base.vocab_size)
    if draft is not None:
        drafter = dataclasses.replace(drafter, draft=draft.fingerprint, lm_head_levels=0)
    return base, None, drafter, draft


@pytest.mark.parametrize("kind", but_slow([NGRAM, HEADS_NGRAM, MODEL], HEADS_NGRAM))
def test_prediction_replays_the_stream(kind: str) -> None:
    """In any batch, with per-step and static trees; what was served makes later texts take fewer steps."""
    base, heads, drafter, draft = setting(kind)
    policy = TreePolicy(8, drafter.depth, drafter.id)
    static = dataclasses.replace(Tree.chain(3), drafter=drafter.id)
    texts = stream(base)
    for plan, batch in ((policy, 3), (static, 1)):
        given: dict[str, Any] = {"drafter": drafter, "draft": draft, "max_new_tokens": NEW, "batch_size": batch}
        without = validate(base, heads, plan, texts, **given)
        memory = Memory(1 << 16)
        found = validate(base, heads, plan, texts, memory=memory, **given)
        assert found.lossless
        assert found.prediction_misses == ()
        assert found.tokens_per_step == found.predicted.tokens_per_step > without.tokens_per_step
        served = [[*one.prompt, *one.answer] for one in found.texts]
        assert [one.tolist() for one in memory.texts()] == served
    again = validate(base, heads, static, texts, memory=memory, **given)
    assert again.prediction_misses == ()
    assert again.tokens_per_step > found.tokens_per_step


def test_ring_that_is_written_over_is_predicted() -> None:
    """The memory holds a part of the stream only."""
    base, _, drafter, _ = setting(NGRAM)
    memory = Memory(1 << 12)
    texts = stream(base, 5)
    policy = TreePolicy(8, drafter.depth, drafter.id)
    for _ in range(2):  # the second time the memory is full before the first text
        found = validate(base, None, policy, texts, drafter=drafter, memory=memory, max_new_tokens=20)
        assert memory.arrays.end[0] > 1.5 * memory.num_tokens
        assert found.lossless
        assert found.prediction_misses == ()


def test_short_windows_are_predicted() -> None:
    """The memory compares more tokens of a text than a short window has."""
    base, _, drafter, _ = setting(NGRAM)
    drafter, texts = dataclasses.replace(drafter, window=4), stream(base)
    policy = TreePolicy(8, drafter.depth, drafter.id)
    found = validate(base, None, policy, texts, drafter=drafter, memory=Memory(1 << 16), max_new_tokens=NEW)
    assert found.prediction_misses == ()


def test_a_shared_proposer_keeps_its_memories_apart() -> None:
    """A decoder without a memory does not search that of another one; a dropped memory is freed."""
    base, _, drafter, _ = setting(NGRAM)
    proposer, policy, memory = proposer_for(base, None, drafter), TreePolicy(8, 8, drafter.id), Memory(1 << 16)
    alone = TreeDecoder(base, None, policy, drafter=proposer)
    prompt = stream(base)[0].prompt
    steps = len(alone.generate(prompt, NEW).steps)
    within = TreeDecoder(base, None, policy, drafter=proposer, memory=memory)
    counts = [len(within.generate(prompt, NEW).steps) for _ in range(2)]
    assert counts[1] < counts[0] == steps == len(alone.generate(prompt, NEW).steps)
    given: Any = {"custom_generate": library.tree_generate, "drafter": drafter, "tree": policy, "memory": memory}
    base.model.generate(torch.tensor([prompt]), max_new_tokens=4, **given)
    gone = weakref.ref(memory)
    del memory, within, given
    gc.collect()
    assert gone() is None


def test_dialogues_are_predicted() -> None:
    """Turns of a dialogue are drafted with the texts of earlier batches, and added with their batch."""
    rows = [{"turns": ["def f(x):", "return x"]}, {"turns": ["import os", "import sys"]}, {"turns": ["def f(x):", "a"]}]
    memory = Memory(1 << 16)
    base = load_base("pocket")
    drafter = Drafter.untrained(base.vocab_size)
    policy = TreePolicy(8, drafter.depth, drafter.id)
    found = validate(base, None, policy, rows, drafter=drafter, memory=memory, max_new_tokens=NEW, batch_size=2)
    assert found.lossless
    assert found.prediction_misses == ()
    assert len(memory.texts()) == len(found.texts) == 6


def test_decoder_adds_each_text_once() -> None:
    """Of a batch when all have ended; a decoder without drafts adds its texts too, and so does `tree_generate`."""
    base, _, drafter, _ = setting(NGRAM)
    texts, memory = stream(base), Memory(1 << 16)
    policy = TreePolicy(8, drafter.depth, drafter.id)
    decoder = TreeDecoder(base, None, policy, drafter=drafter, memory=memory)
    running = decoder.start_all([text.prompt for text in texts[:2]], NEW)
    next(running)
    assert memory.num_tokens == 0
    list(running)
    made = answered(base, texts[:2], NEW)
    assert [one.tolist() for one in memory.texts()] == [[*one.prompt, *one.answer] for one in made]
    TreeDecoder(base, None, Tree(()), memory=memory).generate(texts[2].prompt, NEW)
    assert len(memory.texts()) == 3
    ids = torch.tensor([texts[2].prompt])
    given = {"custom_generate": library.tree_generate, "drafter": drafter, "tree": policy, "memory": memory}
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    outs = [base.model.generate(ids, **options, **given) for _ in range(2)]
    stock = base.model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert [one.sequences.tolist() for one in outs] == [stock.tolist()] * 2
    assert len(memory.texts()) == 5
    assert outs[1].tokens_per_step > 3
    other = Memory(1 << 16)
    for one, count in ((None, 0), (other, 1)):
        base.model.generate(ids, **options, **{**given, "memory": one})
        assert len(other.texts()) == count
    assert len(memory.texts()) == 5


@looped("rule", [Sample(), Typical()])
def test_other_rules_are_refused(rule: Any) -> None:
    """Their steps with a memory are not predicted; a drafter that searches no text has no use for one."""
    base, _, drafter, _ = setting(NGRAM)
    given = (base, None, TreePolicy(8, drafter.depth, drafter.id), stream(base))
    refused = refusal_of(validate, *given, drafter=drafter, memory=Memory(1 << 16), acceptance=rule)
    assert refused.code is Code.GENERATE_UNSUPPORTED
    policy = TreePolicy(8, drafter.depth, drafter.id)
    refused = refusal_of(TreeDecoder, base, None, policy, drafter=drafter, memory=Memory(1 << 16), acceptance=Typical())
    assert refused.code is Code.GENERATE_UNSUPPORTED
    with pytest.raises(TypeError, match="load_memory"):
        TreeDecoder(base, None, policy, drafter=drafter, memory="file")  # type: ignore[arg-type]
    base, heads = planted(3)
    refused = refusal_of(TreeDecoder, base, heads, Tree.chain(2), memory=Memory(1 << 16))
    assert refused.code is Code.DRAFTER_MISMATCH


def test_memory_of_another_vocabulary_is_refused() -> None:
    """E223 names both sizes."""
    base, _, drafter, _ = setting(NGRAM)
    memory = Memory(1 << 16)
    memory.fit(base.vocab_size + 1, "another model")
    policy = TreePolicy(8, drafter.depth, drafter.id)
    refused = refusal_of(TreeDecoder, base, None, policy, drafter=drafter, memory=memory)
    assert refused.code is Code.DRAFTER_MISMATCH
    assert str(base.vocab_size) in refused.what


PROMPT = "import os\nimport sys\n\ndef main(path):\n"


def test_generate_learns_from_what_it_served(tmp_path: Path) -> None:
    """The file is made, and the same prompt takes fewer steps the second time, with the same text."""
    file = tmp_path / "memory"
    given = ("generate", PROMPT, "--memory", file, "--max-new-tokens", "32")
    first, second = treeopt_json(*given), treeopt_json(*given)
    assert first["steps"] == treeopt_json("generate", PROMPT, "--max-new-tokens", "32")["steps"]  # it was empty
    result = tmp_path / "result.json"
    result.write_text(json.dumps(second))
    assert "has learned its text since" in error_of("E203", "reproduce", result)
    assert first["text"] == second["text"]
    assert len(second["step_lengths"]) < len(first["step_lengths"])
    assert [len(step["tokens"]) for step in second["steps"]] == second["step_lengths"]
    assert len(load_memory(file).texts()) == 2
    before = file.read_bytes()
    found = treeopt_json("validate", "--memory", file, "--limit", "2", "--max-new-tokens", "8")
    assert found["configuration"]["made-by"]["memory_id"] == load_memory(file).id
    assert file.read_bytes() == before
    assert "E203" in error_of("E203", "generate", PROMPT, "--memory", __file__)
    assert "there is no" in error_of("E201", "validate", "--memory", tmp_path / "none", "--limit", "1")
    treeopt("validate", "--memory", "empty", "--nproc", "2", status=2)
    treeopt("generate", PROMPT, "--memory", file, "--acceptance", "rejection", "--draft", "pocket-draft", status=2)
    error_of("E223", "generate", PROMPT, "--memory", file, "--tree", "mc_sim_7b_63")
    error_of("E510", "generate", PROMPT, "--memory", file, "--acceptance", "typical")
    treeopt("validate", "--memory", file, "--acceptance", "sample", status=2)
    before_svg = tmp_path / "memory.svg"
    before_svg.write_bytes(before)
    few = ("--limit", "2", "--methods", "ngram", "--max-new-tokens", "4")
    error_of("E204", "compare", "--memory", before_svg, "--svg", before_svg, "--force", *few)
    assert before_svg.read_bytes() == before
    with Lock(file):  # of this process, which may write it
        line = [sys.executable, "-m", "treeopt", "generate", "a", "--memory", str(file)]
        ended = subprocess.run(line, capture_output=True, text=True, check=False)
        assert "E204" in ended.stderr
        assert "in use" in ended.stderr
    assert file.read_bytes() == before


def test_compare_has_rows_with_the_memory() -> None:
    """Per-step trees of drafters with an n-gram table are decoded a second time; each text is added once."""
    memory, prompts = Memory(1 << 16), ["import os", "def f(path):", "class B:", "class B:\n"]
    options: Any = {"repeats": 1, "max_new_tokens": 16, "learn_tokens": 0, "methods": ["ngram"], "sizes": (4,)}
    for count in (1, 2):  # the second time every text is known
        found = library.compare("pocket", "pocket", prompts, memory=memory, **options)
        assert {row.same for row in found.rows if row.figures} == {len(found.texts)}
        assert len(memory.texts()) == count * len(found.texts)
    tau = {row.method: row.figures.mean_acceptance_length for row in found.rows if row.figures}
    assert [name for name in tau if "memory" in name] == ["ngram, with the memory"]
    assert tau["ngram, with the memory"] > 1.5 * tau["ngram, per step"]
    given = ("--limit", "2", "--max-new-tokens", "4", "--repeats", "1", "--learn-tokens", "0", "--nodes", "4")
    line = ("compare", *given, "--methods", "ngram", "--memory", "empty")
    assert "it also learns the compared texts" in treeopt(*line).stdout
    data = treeopt_json(*line)
    assert "ngram, with the memory" in [row["method"] for row in data["rows"]]
