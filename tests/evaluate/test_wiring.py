"""The wiring of drafters: hits, the rule that decides, variants, and planted faults."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import answered, prompts_of
from program import treeopt, treeopt_json
from safetensors.torch import load_file, save_file
from tiny import but_slow, tiny_base
from tiny_modules import BLOCKS, tiny_module

from treeopt.drafting.block import ConditionalSession
from treeopt.drafting.trace import positions_of
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate import diagnosis
from treeopt.evaluate import wiring as checked
from treeopt.evaluate.diagnosis import diagnose, findings_in_files, findings_of_heads, measured
from treeopt.evaluate.wiring import (
    ERRORS,
    LEAST,
    ORDER,
    Hits,
    WiringCheck,
    bigram_rate,
    check_wiring,
    confidence_errors,
    hits_of,
    kept_states,
    wired,
)
from treeopt.files.bundled import pocket as pocket_folder
from treeopt.models.base import Base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import DraftModule
from treeopt.models.given import load_pair
from treeopt.models.head_files import load_heads
from treeopt.models.heads import MedusaHeads
from treeopt.models.variants import BEFORE_NORM, as_heads, variants_of
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import as_prompt_set, load_prompts
from treeopt.verify.probe import same_route

VOCAB = 13
KINDS = ("eagle3", "eagle1", "peagle", "mtp", "mtp3", *BLOCKS)


def hits(name: str, *counts: tuple[int, int]) -> Hits:
    """Hits of level 1 and positions of each text."""
    found = np.array(counts)
    return Hits(name, found[:, :1], found[:, 1:])


def test_gain_and_its_error_by_hand() -> None:
    """Over 40 positions of two texts the gain is 3 / 40, and residuals are 2 - 30 * 3/40 and 1 - 10 * 3/40."""
    mean, error = hits("b", (12, 30), (6, 10)).gain(hits("a", (10, 30), (5, 10)))
    assert mean == pytest.approx(3 / 40)
    assert error == pytest.approx((2 * ((2 - 2.25) ** 2 + (1 - 0.75) ** 2)) ** 0.5 / 40)


@pytest.mark.parametrize("above", [True, False])
def test_rule_at_its_edge(above: bool) -> None:
    """A gain of just more than three errors, or of just less; and of just more than the least share, or less."""
    texts, more = 100, 1e-3 if above else -1e-3
    gain = np.full(texts, 2.0) + np.resize([1.0, -1.0], texts)  # mean 2, and its error by the spread
    error = np.sqrt((np.resize([1.0, -1.0], texts) ** 2).sum() * texts / (texts - 1)) / texts
    base = np.zeros((texts, 1), np.int64)
    scale = 1000
    shift = ERRORS * error * (1 + more) - 2
    one = Hits("b", np.round((gain + shift) * scale).astype(np.int64)[:, None], np.full((texts, 1), scale))
    assert one.fits_better(Hits("a", base, one.positions)) is above
    even = np.full((texts, 1), 100_000)
    small = Hits("b", np.full((texts, 1), round(100_000 * LEAST * (1 + more))), even)
    assert small.fits_better(Hits("a", base, even)) is above


def test_verdicts() -> None:
    """As trained, another wiring with who reads it so, and too weak for any."""
    sound, better = hits("as wired", *[(40, 100)] * 20), hits("norms as 1 + w", *[(60, 100), (61, 100)] * 10)
    said = WiringCheck(sound, (sound,), 0.2).verdict
    assert said.startswith("as trained: none of 1 other wiring fits better; level 1 is right 40.0% of the time")
    assert said.endswith("a guess by the last token 20.0%")
    found = WiringCheck(sound, (hits("x", *[(50, 100)] * 20), better), 0.2)
    assert [one.name for one in found.better] == ["norms as 1 + w", "x"]
    assert found.verdict.startswith("norms as 1 + w: fits better by 20.5%")
    assert "Qwen3.5" in found.verdict
    assert WiringCheck(sound, (better,), 0.7).verdict.startswith("too weak for any wiring: level 1 is right 60.5%")


def test_bigrams_are_those_of_other_texts() -> None:
    """1 follows 2 in the other text, too; what follows 1 differs."""
    texts = [Text("0", [1], [2, 1, 3]), Text("1", [1], [2, 1, 9])]
    assert bigram_rate(texts) == pytest.approx(2 / 4)


def test_few_texts_are_not_judged() -> None:
    """The error of one text is 0, whatever it is."""
    few = [hits(name, (found, 100)) for name, found in (("as wired", 40), ("norms as 1 + w", 60))]
    assert WiringCheck(few[0], (few[1],), 0.2).verdict.startswith("not judged: 1 text with 100 positions")
    assert not WiringCheck(few[0], (few[1],), 0.2).better
    same = [hits(name, *[(found, 6)] * 6) for name, found in (("as wired", 1), ("norms as 1 + w", 3))]
    check = WiringCheck(same[0], (same[1],), 0.9)
    assert (check.better, check.too_weak, check.verdict[:37]) == ([], False, "not judged: 6 texts with 36 positions")
    none = hits("as wired", *[(0, 0)] * 6)
    assert WiringCheck(none, (), 1.0).verdict.startswith("not judged: 6 texts with 0 positions")
    assert not WiringCheck(none, (), 1.0).too_weak
    assert "no other wiring to try" in WiringCheck(hits("as wired", *[(40, 100)] * 6), (), 0.2).verdict


@torch.inference_mode()
def all_ranks(base: Base, draft: Any, texts: list[Text], states: list[torch.Tensor]) -> np.ndarray:
    """The ranks of the true tokens among all."""
    record = checked.Drafter.model_only(2, VOCAB, draft.fingerprint, checked.kind_of(draft.model))
    proposer = checked.proposer_for(base, None, record, draft)
    return np.concatenate([session.trace(true)[0] for session, true in positions_of(proposer, texts, states)])


@pytest.mark.parametrize("kind", KINDS)
def test_each_variant_is_another_drafter(kind: str) -> None:
    """Its ranks differ, and the drafter itself stays what it is."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    base.model.model.norm.weight.data += torch.rand(base.hidden_size)
    draft = tiny_module(base, kind, 2, vocabulary=8 * (kind in ("eagle3", "block")))
    before = {name: one.clone() for name, one in draft.model.state_dict().items()}
    texts = answered(base, prompts_of(2, 3, longest=20, vocab=VOCAB), 12)
    variants = [wired(base, draft), *variants_of(base, draft)]
    kept = kept_states(base, texts, sorted({index for one in variants for index in one.reads}))
    ranks = []
    for one in variants:
        if isinstance(draft.model, DraftModule):
            same_route(one.draft, draft)
        whole = [torch.cat(parts, dim=-1) for parts in zip(*(kept[index] for index in one.reads), strict=True)]
        ranks.append(all_ranks(base, one.draft, texts, whole))
    assert len({one.name for one in variants}) == len(variants) > 5
    for one, other in zip(variants[1:], ranks[1:], strict=True):
        assert not np.array_equal(other, ranks[0]), one.name
    for name, weight in draft.model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert np.array_equal(all_ranks(base, draft, texts, states_as_wired(draft, kept)), ranks[0])


def states_as_wired(draft: Base, kept: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(one, dim=-1) for one in zip(*(kept[index] for index in draft.model.wiring.reads), strict=True)]


def test_rotary_variants_undo_each_other() -> None:
    """And they are two, and leave all but queries and keys."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "block", 2)
    both = "rotary embedding interleaved", "rotary embedding in halves"
    found = [{one.name: one.draft for one in variants_of(base, draft)}[name] for name in both]
    states = [one.model.state_dict() for one in (draft, *found)]
    changed = [{key for key, one in state.items() if not torch.equal(one, states[0][key])} for state in states[1:]]
    assert {key.rpartition("self_attn.")[2][:2] for key in changed[0]} == {"q_", "k_"}
    assert any(not torch.equal(states[1][key], states[2][key]) for key in changed[0])
    for one, name in zip(found, both[::-1], strict=True):
        undone = {each.name: each.draft for each in variants_of(base, one)}[name].model.state_dict()
        assert all(torch.equal(undone[key], states[0][key]) for key in states[0])


def test_another_dtype_keeps_rotary_frequencies() -> None:
    """As a model that is loaded in that dtype."""
    base = tiny_base("llama", 1, vocab_size=VOCAB).in_dtype("bfloat16")
    assert {weight.dtype for weight in base.model.parameters()} == {torch.bfloat16}
    assert base.model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_state_before_the_norm(name: str) -> None:
    """The model's own norm makes of it the last state."""
    base = tiny_base(name, 1, vocab_size=VOCAB)
    texts = answered(base, prompts_of(2, 2, longest=20, vocab=VOCAB), 4)
    kept = kept_states(base, texts, [BEFORE_NORM, base.layers])
    for before, after in zip(kept[BEFORE_NORM], kept[base.layers], strict=True):
        torch.testing.assert_close(base.model.model.norm(before), after)
        assert not torch.equal(before, after)


@pytest.fixture(scope="module")
def pocket() -> tuple[Base, MedusaHeads, list[Text]]:
    """The built-in model, its heads, and six answers."""
    base, loaded = load_pair("pocket", None, dtype="float32", device="cpu")
    assert loaded is not None
    encoded = encode_prompts(base, load_prompts("pocket", limit=6), 32)
    return base, loaded.heads, answer_all(base, encoded.texts, AnswerOptions(32))[0]


def test_heads(pocket: tuple[Base, MedusaHeads, list[Text]]) -> None:
    """As trained; and in another order, which is found."""
    base, heads, texts = pocket
    assert not check_wiring(base, heads, texts).better
    found = check_wiring(base, as_heads(heads, MedusaHeads, [1, 2, 0, *range(3, heads.num_heads)]), texts)
    assert found.better[0].name == ORDER
    assert found.better[0].rates == check_wiring(base, heads, texts).wired.rates


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose config names other layers: the fault is named, and the exit status is 6. Its own is as trained."""
    monkeypatch.chdir(tmp_path)
    few = ("--limit", "10", "--max-new-tokens", "16", "--model", "pocket")
    shutil.copytree(pocket_folder().with_name("pocket-eagle3"), "wrong")
    config = json.loads(Path("wrong/config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    Path("wrong/config.json").write_text(json.dumps(config))
    wrong = treeopt("doctor", "--draft", "wrong", *few, "--no-texts", status=6)
    assert "states of one layer below: fits better by" in wrong.stdout
    sound = treeopt_json("doctor", "--draft", "pocket-eagle3", *few)
    assert (sound["better"], sound["too_weak"], sound["texts"]) == ([], False, 10)
    names = [row["name"] for row in sound["table"]]
    assert names[0] == "as wired"
    assert {"sampled answers", "in bfloat16", "LM head of the base"} <= set(names)


def test_prompts_without_answers_and_those_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty answers are no given ones, and a prompt that does not fit is named."""
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"def f{i}(x):" + "\n  return x" * (3000 * (i == 3)), "output": ""} for i in range(6)]
    Path("rows.json").write_text(json.dumps(rows))
    line = ("doctor", "--heads", "pocket", "--prompts", "rows.json", "--max-new-tokens", "4")
    result = treeopt(*line)
    assert "skipped 1 prompt: row 3 (too long for the context" in result.stdout
    assert "given answers" not in result.stdout
    [skipped] = treeopt_json(*line, "--no-texts")["skipped_prompts"]
    assert skipped["reason"] == "too long for the context"


@pytest.mark.slow
def test_confidence_in_command() -> None:
    """One line has the errors of all seven levels, and the result has the same. Another drafter has none."""
    few = ("--limit", "6", "--max-new-tokens", "16", "--model", "pocket", "--no-texts", "--draft")
    draft = str(Path(__file__).resolve().parent.parent / "data" / "pocket-dspark")
    [line] = [one for one in treeopt("doctor", *few, draft).stdout.splitlines() if one.startswith("confidence head:")]
    shown = [float(one) for one in re.findall(r"(\d+\.\d)%", line)]
    assert line.endswith(", by level")
    assert len(shown) == 7
    assert max(shown) < 30  # it was trained
    result = treeopt_json("doctor", *few, draft)["calibration_errors"]
    assert shown == pytest.approx([100 * one for one in result], abs=0.051)
    assert "confidence" not in treeopt("doctor", *few, "pocket-eagle3").stdout


class Given(ConditionalSession):
    """A session of one text whose log-odds and ranks are given."""

    def __init__(self, chances: list[list[float]], ranks: list[list[int]]) -> None:
        chance = np.array(chances)
        self.given, self.ranks = np.log(chance / (1 - chance)), np.array(ranks)

    def odds(self, true: Any) -> Any:
        return np.full_like(self.given, 9.0), self.given

    def trace(self, true: Any, *, confidence: bool = False) -> Any:
        return self.ranks, None


def test_confidence_errors_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bins of a tenth; a position without a true token does not count.

    Level 1: 0.62 and 0.68 are of one bin, with one hit of two: |1.3 - 1|; 0.91 is right: |0.91 - 1|; 0.04 is not. Level
    2: 0.3 and 0.99 have no true token; 0.55 and 0.45 are of two bins, right and wrong: |0.55 - 1| and |0.45 - 0|.
    """
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "dspark", 2)
    parts = [
        (Given([[0.62, 0.55], [0.68, 0.3]], [[0, 0], [3, 0]]), np.array([[1, 1], [1, -1]])),
        (Given([[0.91, 0.45], [0.04, 0.99]], [[0, 1], [2, 0]]), np.array([[1, 1], [1, -1]])),
    ]
    monkeypatch.setattr(checked, "positions_of", lambda *_: iter(parts))
    found = confidence_errors(base, draft, answered(base, prompts_of(1, 3, longest=9, vocab=VOCAB), 4))
    assert found == pytest.approx([(0.3 + 0.09 + 0.04) / 4, (0.45 + 0.45) / 2])


def test_confidence_errors_of_a_constant() -> None:
    """A head that always says 30 % is off by its distance from the share of hits of each level."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "dspark", 2)
    for name, weight in draft.model.confidence_head.named_parameters():
        weight.data.fill_(np.log(0.3 / 0.7) if name.endswith("bias") else 0.0)
    texts = answered(base, prompts_of(3, 3, longest=20, vocab=VOCAB), 12)
    drafter = wired(base, draft)
    hits = hits_of(base, drafter, texts, kept_states(base, texts, drafter.reads))
    rates = hits.hits.sum(0) / hits.positions.sum(0)
    assert len({*rates}) > 1
    found = confidence_errors(base, draft, texts)
    assert len(found) == draft.model.levels
    assert found[: len(rates)] == pytest.approx(np.abs(rates - 0.3), abs=1e-6)
    assert confidence_errors(base, tiny_module(base, "dspark-rnn", 2), texts) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--model", "pocket"), "has no drafter"), (("--draft", "pocket-eagle3", "--heads", "pocket"), "one drafter")],
)
def test_one_drafter_is_named(arguments: tuple[str, ...], said: str) -> None:
    assert said in treeopt("doctor", *arguments, status=2).stderr


def test_copies_of_another_revision() -> None:
    """Embeddings that are not the base's are said to be another revision's."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2)
    assert findings_in_files(base, draft) == []
    own = torch.nn.Embedding.from_pretrained(base.model.get_input_embeddings().weight * 1.1)
    draft.model.wiring = dataclasses.replace(draft.model.wiring, own_embeddings=True)
    draft.model.embeddings = own
    assert findings_in_files(base, draft) == [
        "its embeddings differ from the base's by 10%: another revision, or trained"
    ]


def diagnosed(pocket: tuple[Base, MedusaHeads, list[Text]], rows: list[Any], given: Any = None) -> Any:
    base, heads, _ = pocket
    more = None if given is None else as_prompt_set(given, answers=True)
    return diagnose(base, heads, as_prompt_set(rows), AnswerOptions(24), texts=True, given=more)


CODE = [str(one.text) for one in load_prompts("pocket", limit=20).prompts]


def test_sampled_answers_and_those_of_another_author(pocket: tuple[Base, MedusaHeads, list[Text]]) -> None:
    """Both accept less than greedy ones, and are told apart; nothing else is said of sound heads."""
    rng = np.random.default_rng(0)
    rows = [{"instruction": text, "output": " ".join(map(str, rng.integers(0, 10**6, 16)))} for text in CODE]
    found = diagnosed(pocket, CODE, rows)
    said = [cause.partition(" accept")[0] for cause in found.causes]
    assert said == ["sampled text", "the answers of the prompts' file"]
    assert [one.hits.name for one in found.others] == ["sampled answers", "given answers", "in bfloat16"]
    assert found.others[1].difference < -0.1
    assert not found.wiring.better


@pytest.mark.slow
def test_another_chat_template(pocket: tuple[Base, MedusaHeads, list[Text]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a template that the heads were not trained with."""
    template = "{% for m in messages %}{{ m['content'][::-1] }}{% endfor %}"
    monkeypatch.setattr(pocket[0].tokenizer, "chat_template", template, raising=False)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in CODE]
    found = diagnosed(pocket, rows)
    assert any(cause.startswith("the drafter fits text without the chat template better") for cause in found.causes)


@pytest.mark.slow
def test_chat_template_that_is_missing(
    pocket: tuple[Base, MedusaHeads, list[Text]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are served without the template that they were trained with: requests are turned round without it."""
    template = "{% for m in messages %}{{ m['content'][::-1] }}{% endfor %}"
    monkeypatch.setattr(pocket[0].tokenizer, "chat_template", template, raising=False)
    rows = [{"messages": [{"role": "user", "content": text[::-1]}]} for text in CODE]
    base, heads, _ = pocket
    found = diagnose(base, heads, as_prompt_set(rows), AnswerOptions(24, chat_template=False), texts=True)
    assert any(cause.startswith("the drafter fits text with the chat template better") for cause in found.causes)
    assert "without the chat template" not in [one.hits.name for one in found.others]


def test_turns_of_the_other_template(
    pocket: tuple[Base, MedusaHeads, list[Text]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dialogue's later turns are rendered as the first one is: all with the template, or all without."""
    base, heads, _ = pocket
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    monkeypatch.setattr(base.tokenizer, "chat_template", template, raising=False)
    rows = [{"turns": ["import os", f"import sys{i}"]} for i in range(6)]
    shown: dict[str, list[str]] = {}

    def kept(base: Base, draft: Any, texts: Any, name: str) -> Any:
        shown[name] = [base.tokenizer.decode(text.prompt) for text in texts if text.turn > 1]
        return measured(base, draft, texts, name)

    monkeypatch.setattr(diagnosis, "measured", kept)
    diagnose(base, heads, as_prompt_set(rows), AnswerOptions(8), texts=True)
    assert shown["without the chat template"]
    assert not any("<" in text for text in shown["without the chat template"])
    assert all("<" in text for text in shown["sampled answers"])


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ '' }}", "{{ messages[0]['content'] }}"])
def test_chat_template_that_cannot_be_tried(
    pocket: tuple[Base, MedusaHeads, list[Text]], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """A template that refuses the messages, gives no text or gives the same text has no row."""
    base, heads, _ = pocket
    monkeypatch.setattr(base.tokenizer, "chat_template", template, raising=False)
    rows = as_prompt_set([{"messages": [{"role": "user", "content": text}]} for text in CODE[:2]])
    found = diagnose(base, heads, rows, AnswerOptions(8, chat_template=False), texts=True)
    assert [one.hits.name for one in found.others] == ["sampled answers", "in bfloat16"]


def copied_head(folder: Path) -> Path:
    return Path(shutil.copytree(pocket_folder().with_name("pocket-eagle3"), folder))


def test_another_tokenizer(pocket: tuple[Base, MedusaHeads, list[Text]], tmp_path: Path) -> None:
    """A tokenizer beside the head that gives two tokens each other's number; nothing is said of the base's own."""
    base, folder = pocket[0], copied_head(tmp_path / "head")
    shutil.copy(pocket_folder() / "tokenizer.json", folder)
    assert findings_in_files(base, load_draft(str(folder), base)) == []
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    [cause] = findings_in_files(base, load_draft(str(folder), base))
    assert cause == f"{folder} was made for another tokenizer: 2 of its tokens have other numbers here"
    tokenizer["model"] = {"type": "Unigram", "vocab": [[token, 0.0] for token in (other, one)]}
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 of its tokens" in findings_in_files(base, load_draft(str(folder), base))[0]
    for broken in ("{", "[]", '{"model": {"vocab": 1}}', '{"model": {"vocab": [1]}}'):
        (folder / "tokenizer.json").write_text(broken)
        assert findings_in_files(base, load_draft(str(folder), base)) == []


@pytest.mark.parametrize("as_tokens", but_slow([False, True], True))
def test_draft_vocabulary_of_a_trained_head(
    pocket: tuple[Base, MedusaHeads, list[Text]], tmp_path: Path, as_tokens: bool
) -> None:
    """A sound head that drafts a part of the tokens is as trained, and the share of others is a cause.

    Where its d2t holds tokens instead of distances, the error says so.
    """
    base, folder = pocket[0], copied_head(tmp_path / "head")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tokens = torch.arange(0, base.vocab_size, 2)[1:]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][tokens]
    tensors["d2t"] = tokens if as_tokens else tokens - torch.arange(len(tokens))
    tensors["t2d"] = torch.zeros(base.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    save_file({key: one.contiguous() for key, one in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(tokens)}))
    if as_tokens:
        with pytest.raises(TreeoptError) as raised:
            load_draft(str(folder), base)
        assert raised.value.code is Code.DRAFT_INVALID
        assert "its d2t holds tokens" in raised.value.fix
        return
    found = diagnose(base, load_draft(str(folder), base), as_prompt_set(CODE), AnswerOptions(16), texts=False)
    assert any("are not in the draft vocabulary" in cause for cause in found.causes)
    assert found.wiring.verdict.startswith("as trained"), found.wiring.verdict
    assert "a guess by the last token" in found.wiring.verdict


def test_quantised_base(pocket: tuple[Base, MedusaHeads, list[Text]], monkeypatch: pytest.MonkeyPatch) -> None:
    base, heads, _ = pocket
    monkeypatch.setattr(base.model.config, "quantization_config", {"bits": 4}, raising=False)
    assert findings_in_files(base, heads)[0].startswith("the base is quantised")


class RoundedHeads(MedusaHeads):
    """Heads that are right on states of bfloat16 alone."""

    def features(self, hidden: torch.Tensor, first: int | None = None) -> torch.Tensor:
        rounded = torch.equal(hidden, hidden.bfloat16().to(hidden.dtype))
        return super().features(hidden if rounded else hidden.flip(-1), first)


@pytest.mark.slow
def test_another_precision(pocket: tuple[Base, MedusaHeads, list[Text]]) -> None:
    base, heads, texts = pocket
    found = diagnosed((base, as_heads(heads, RoundedHeads), texts), CODE)
    assert "the drafter fits bfloat16 better" in found.causes
    assert found.others[-1].difference > 0.1


def test_adapter_that_is_not_used(pocket: tuple[Base, MedusaHeads, list[Text]]) -> None:
    """What the loader warned of is a cause."""
    note = "heads were trained with an adapter of its base, which is not used (--adapter)"
    base = dataclasses.replace(pocket[0], notes=(f"warning: {note}", "a remark"))
    assert findings_in_files(base, pocket[1]) == [note]


def test_another_number_of_heads(tmp_path: Path) -> None:
    """That of the config, by which some engines load them."""
    folder = tmp_path / "heads"
    shutil.copytree(pocket_folder() / "heads", folder)
    assert findings_of_heads(load_heads(folder)) == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3}))
    assert findings_of_heads(load_heads(folder)) == [
        "config.json says 3 heads, the file has 5: an engine may run the former"
    ]


def test_tokens_outside_the_draft_vocabulary(pocket: tuple[Base, MedusaHeads, list[Text]]) -> None:
    """Their share is said."""
    base = pocket[0]
    draft = tiny_module(base, "eagle3", 2, vocabulary=100)
    found = diagnose(base, draft, as_prompt_set(CODE[:8]), AnswerOptions(8), texts=False)
    assert any("are not in the draft vocabulary" in cause for cause in found.causes)
    assert found.wiring.too_weak
