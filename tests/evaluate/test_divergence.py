"""Divergence: planted ties, planted rounding and planted bugs are told apart, in float32 and in bfloat16."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import TREE_FAMILIES, tiny_base
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from treeopt.evaluate.divergence import ENDED, Cause, Difference, Judge, _in_float64, first_difference, tolerated
from treeopt.models.base import Base
from treeopt.texts.encode import Text

PROMPT = [3, 5, 8, 13, 21]
LENGTH = 12


def name_of(dtype: torch.dtype) -> str:
    """As a base model names its dtype."""
    return str(dtype).removeprefix("torch.")


def stock(base: Base, length: int = LENGTH) -> list[int]:
    """The greedy continuation of `PROMPT`."""
    ids = torch.tensor([PROMPT])
    return base.generate(ids, torch.ones_like(ids), length)[0, len(PROMPT) :].tolist()


def decided(judge: Judge, greedy: list[int], found: list[int]) -> Difference:
    """The judgement on a text `found` where stock generate has another."""
    text = Text("a:0", PROMPT, greedy)
    return judge.decide(first_difference(text, "tree", found), text)


def judged(base: Base, at: int, token: int) -> Difference:
    """The judgement on a text that has `token` at a position where stock generate has another."""
    greedy = stock(base)
    return decided(Judge(base, 16), greedy, [*greedy[:at], token, 7, 7])


def twin(base: Base, at: int, step: float = 0.0) -> int:
    """Give another token the LM head row of the one chosen at a position; returns that token.

    `step` moves one weight of the new row, down from the chosen token's logit, by so many units in the last place.
    """
    row = base.lm_head.weight[stock(base)[at]].detach().clone()
    ids = torch.tensor([[*PROMPT, *stock(base)[:at]]])
    state = base.forward(ids)[1][0, -1]
    place = int(state.abs().argmax())
    row[place] -= torch.sign(state[place]) * row[place].abs() * torch.finfo(base.dtype).eps * step
    other = next(token for token in reversed(range(base.vocab_size)) if token not in [*PROMPT, *stock(base)])
    with torch.no_grad():
        base.lm_head.weight[other] = row
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tie(dtype: torch.dtype) -> None:
    """Two equal rows of the LM head: a tie, whichever is chosen, and nothing is lost in any dtype."""
    base = Base(tiny_base("llama").model.to(dtype), None, "tiny")
    found = judged(base, 4, twin(base, 4))
    assert (found.cause, found.position) == (Cause.TIE, 4)
    assert found.gap < 1e-12
    assert tolerated(found, name_of(dtype))


@pytest.mark.parametrize(("dtype", "fine"), [(torch.float32, False), (torch.bfloat16, True)])
def test_rounding(dtype: torch.dtype, fine: bool) -> None:
    """A row that is one unit in the last place lower: rounding, tolerated in half precision and not in float32."""
    base = Base(tiny_base("llama").model.to(dtype), None, "tiny")
    found = judged(base, 4, twin(base, 4, step=1.0))
    assert found.cause is Cause.ROUNDING
    assert 1e-12 < found.gap < found.resolution
    assert tolerated(found, name_of(dtype)) is fine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 30, 60])
def test_bug(dtype: torch.dtype, rank: int) -> None:
    """Any other token than the first, its runner-up included, is a bug in both dtypes; the gap is that of float64."""
    base = Base(tiny_base("llama").model.to(dtype), None, "tiny")
    greedy = stock(base)
    exact = tiny_base("llama").model.to(dtype).double()
    logits = exact(torch.tensor([[*PROMPT, *greedy[:6]]])).logits[0, -1].detach()
    found = judged(base, 6, int(logits.argsort(descending=True)[rank]))
    assert found.cause is Cause.BUG
    assert (found.position, found.greedy_token) == (6, greedy[6])
    assert found.gap == pytest.approx(float(logits.max() - logits[found.found_token]), abs=1e-4)
    assert found.gap > 2 * found.resolution > 0
    assert not tolerated(found, name_of(dtype))


def test_two_wrong_tokens_are_a_bug() -> None:
    """Two equal logits far below the largest are no tie: greedy would have taken neither."""
    base = tiny_base("llama")
    with torch.no_grad():
        base.lm_head.weight[50] = base.lm_head.weight[51]
    greedy = stock(base)
    found = decided(Judge(base, 8), [*greedy[:3], 50], [*greedy[:3], 51])
    assert found.cause is Cause.BUG


def test_ended_text_is_a_bug() -> None:
    """Where one text ends and the other goes on there are no two logits to compare."""
    base = tiny_base("llama")
    for greedy, found, tokens in (([4, 5], [4], (5, ENDED)), ([4], [4, 5], (ENDED, 5))):
        difference = decided(Judge(base, 8), greedy, found)
        assert (difference.greedy_token, difference.found_token, difference.position) == (*tokens, 1)
        assert (difference.cause, tolerated(difference, "bfloat16")) == (Cause.BUG, False)
        assert math.isnan(difference.gap)


def test_resolution_is_of_gaps() -> None:
    """The resolution is the largest error of a gap to either token, over all tokens and ways of computing."""
    base = tiny_base("llama").model.to(torch.bfloat16)
    found = judged(Base(base, None, "tiny"), 6, 60)
    judge = Judge(Base(base, None, "tiny"), 16)
    prefix = torch.tensor([*PROMPT, *stock(Base(base, None, "tiny"))[:6]])
    with torch.inference_mode():
        exact, runs = judge._exact_logits(prefix), judge._run_logits(prefix)
    gaps = [
        abs(float((run[token] - run[other]) - (exact[token] - exact[other])))
        for run in runs
        for token in (found.greedy_token, found.found_token)
        for other in range(61)
    ]
    assert len(runs) == 3
    assert found.resolution == pytest.approx(max(gaps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copy_is_exact_and_apart(dtype: torch.dtype) -> None:
    """The copy holds the weights in float64 on the CPU, tied ones once, and none of the model's own memory."""
    base = tiny_base("llama", tie_word_embeddings=True)
    model = base.model.to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = _in_float64(model)
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for name, tensor in copied.state_dict().items():
        assert (tensor.dtype, tensor.device.type) == (torch.float64, "cpu")
        assert tensor.equal(before[name].double())
        assert tensor.data_ptr() not in own
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == dtype


def test_undecided_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model cannot be copied the cause is undecided, and not tolerated."""
    base = tiny_base("llama")
    judge = Judge(base, 8)

    def refuse(*_inputs: object) -> None:
        raise MemoryError

    monkeypatch.setattr("treeopt.evaluate.divergence.copy.deepcopy", refuse)
    found = decided(judge, [4, 5], [4, 6])
    assert (found.cause, tolerated(found, "bfloat16")) == (Cause.UNDECIDED, False)


def test_undecided_where_the_copy_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the copy's forward fails the cause is undecided too."""
    base = tiny_base("llama")
    judge = Judge(base, 8)

    def fail(*_inputs: object, **_named: object) -> None:
        raise RuntimeError("not enough memory")

    assert judge._exact is not None
    monkeypatch.setattr(judge._exact, "forward", fail)
    assert decided(judge, [4, 5], [4, 6]).cause is Cause.UNDECIDED


def test_unjudged_fails_in_float32_alone() -> None:
    """A difference that nobody judged is a failure in float32, and none in half precision; it holds no figures."""
    found = first_difference(Text("a:0", PROMPT, [4, 5, 6]), "tree", [4, 7])
    assert (found.cause, found.position, found.greedy_token, found.found_token) == (Cause.UNJUDGED, 1, 5, 7)
    assert math.isnan(found.gap)
    assert math.isnan(found.resolution)
    assert [tolerated(found, dtype) for dtype in ("float32", "bfloat16", "float16")] == [False, True, True]


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_judge_every_family(family: str) -> None:
    """Every family is computed wholly in float64: alone or beside others, logits agree to its last digits.

    A float64 copy of most families is not enough: their norms and softmax run in float32 whatever the model's dtype.
    """
    base = tiny_base(family)
    judge = Judge(base, 8)
    prefix = torch.arange(20) * 7 % 61
    with torch.inference_mode():
        whole, longer = judge._exact_logits(prefix), judge._exact(torch.cat([prefix, prefix])[None]).logits[0, 19]
        run = judge._run_logits(prefix)
    assert whole.dtype == torch.float64
    error = (run - whole).abs().max()
    assert 1e-8 < error < 1e-4  # float32's own rounding
    assert judged(base, 5, (stock(base)[5] + 1) % 61).cause is Cause.BUG
    assert (whole - longer).abs().max() < 1e-4


def test_mixtures_of_experts_are_judged() -> None:
    """The copy computes experts one by one, as their grouped products have no float64; the run keeps its own way."""
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    base = Base(Qwen3MoeForCausalLM(config).eval().to(torch.bfloat16), None, "moe")
    kind = base.model.config._experts_implementation
    assert kind != "eager"
    assert judged(base, 5, (stock(base)[5] + 1) % 61).cause in (Cause.BUG, Cause.ROUNDING)
    assert base.model.config._experts_implementation == kind


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-mixed"])
def test_float64_everywhere(family: str) -> None:
    """Two different computations agree to 1e-12, which with float32 norms they would not."""
    base = tiny_base(family)
    judge = Judge(base, 8)
    prefix = torch.arange(20) * 7 % 61
    whole = judge._exact_logits(prefix)
    eager = Base(base.model, None, "eager")
    eager.model.set_attn_implementation("eager")
    other = Judge(eager, 8)._exact_logits(prefix)
    assert (whole - other).abs().max() < 1e-12
