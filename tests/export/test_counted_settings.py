"""Settings from an engine's counters alone, which readers of the engines' rules accept."""

from __future__ import annotations

import pytest
from engine_settings import READERS, RefusedError, read_adaptive
from looped import looped
from priced import COSTS, COUNTED, priced
from refusals import refusal_of

from treeopt.engines import SETTINGS
from treeopt.errors import Code
from treeopt.export.settings import METHOD_KEYS, SYNTHETIC, engine_settings

ONE_LENGTH: dict[tuple[str, str], str] = {  # settings of a chain of 3 drafts
    ("vllm", "ngram"): '{"method": "ngram", "num_speculative_tokens": 3}',
    ("sglang", "EAGLE3"): "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4",
    ("sglang", "NGRAM"): "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4 "
    "--speculative-ngram-max-bfs-breadth 1",
    ("sglang", "DFLASH"): "--speculative-algorithm DFLASH --speculative-num-draft-tokens 4",
    ("sglang", "DSPARK"): "--speculative-algorithm DSPARK --speculative-dspark-block-size 3",
    ("trtllm", "Eagle3"): '{"decoding_type": "Eagle3", "max_draft_len": 3}',
    ("llamacpp", "draft-mtp"): "--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0.0",
    ("llamacpp", "ngram-map-k"): "--spec-type ngram-map-k --spec-ngram-map-k-size-m 3",
    ("llamacpp", "ngram-mod"): "--spec-type ngram-mod --spec-ngram-mod-n-max 3 --spec-ngram-mod-n-min 0",
    ("transformers", "prompt_lookup"): '{"prompt_lookup_num_tokens": 3}',
}


@looped("engine, method", ONE_LENGTH)
def test_each_method_has_its_own_settings(engine: str, method: str) -> None:
    """They are those of a chain of 3 drafts, by the engine's names."""
    assert (
        engine_settings(engine, None, drafts=3, measured=COUNTED, method=method).content == ONE_LENGTH[engine, method]
    )


@looped("engine", READERS)
def test_engines_accept_the_settings_of_every_method(engine: str) -> None:
    """With one length, one for each batch, and synthetic rates; a drafter's path is asked for where it is needed."""
    for method, how in SETTINGS[engine].methods.items():
        if method == "medusa":  # vLLM 0.33 has none
            continue
        for profile in (None, priced({1: 0.05}), priced(), priced({1: 3.0, 8: 0.05})):
            drafts = 4 if profile is None else None
            found = engine_settings(engine, None, profile, drafts=drafts, measured=COUNTED, method=method)
            if not found.settings:
                continue
            assert (METHOD_KEYS[engine][1] in found.underived) == how.model, method
            READERS[engine](found.content, "drafter")
            if how.model:
                with pytest.raises(RefusedError):
                    READERS[engine](found.content, "")
            if engine in SYNTHETIC and found.drafts == 4:
                READERS[engine](found.synthetic.content, "drafter")


@looped("engine", READERS)
def test_method_that_counters_do_not_name_is_asked_for(engine: str) -> None:
    """The names are those of the engine."""
    found = engine_settings(engine, None, drafts=2, measured=COUNTED)
    why = found.underived[METHOD_KEYS[engine][0]]
    assert "--method with one of" in why
    assert all(method in why for method in SETTINGS[engine].methods)
    if engine != "transformers":  # of which the file has the length alone
        with pytest.raises(RefusedError):
            READERS[engine](found.content, "drafter")


def test_settings_of_counters_are_the_fastest_lengths() -> None:
    """Each batch has the estimated chain with the most tokens per second."""
    found = engine_settings("vllm", None, priced(), measured=COUNTED, method="eagle3")
    assert found.estimates is not None
    tokens = found.estimates.tokens
    assert found.chains == tokens
    lengths = {
        batch: max(range(5), key=lambda k, cost=cost: tokens[k] / (1 + cost * k))  # type: ignore[misc]
        for batch, cost in COSTS.items()
    }
    table = found.settings["num_speculative_tokens_per_batch_size"]
    covered = {batch: length for first, last, length in table for batch in range(first, last + 1)}
    assert {batch: covered[batch] for batch in COSTS} == lengths
    assert found.drafts == lengths[1]
    assert found.tokens_per_step == tokens[lengths[1]]
    assert found.replay is None


def test_bound_and_rates_of_counters() -> None:
    """The measured length has the engine's mean and rates; shorter ones are estimates without rates."""
    whole, shorter = (engine_settings("vllm", None, drafts=k, measured=COUNTED, method="mtp") for k in (4, 2))
    assert (whole.bound, shorter.bound) == ("measured", "estimate")
    assert whole.tokens_per_step == pytest.approx(2.5)
    assert whole.rates == pytest.approx((0.7, 0.45, 0.25, 0.1))
    assert shorter.rates == ()
    assert refusal_of(lambda: shorter.synthetic).code is Code.PROFILE_INVALID
    assert any("multiple" in note for note in whole.notes)


def test_counters_say_when_the_chain_was_too_short() -> None:
    """Where the longest is the fastest, or without step times."""
    cheap, dear = (engine_settings("chain", None, priced({1: cost}), measured=COUNTED) for cost in (0.01, 0.5))
    unknown = engine_settings("chain", None, drafts=2, measured=COUNTED)
    told = [any("measure with more drafts" in note for note in found.notes) for found in (cheap, dear, unknown)]
    assert told == [True, False, True]
    error = refusal_of(engine_settings, "chain", None, drafts=5, measured=COUNTED)
    assert error.code is Code.TREE_TOO_DEEP
    assert "the engine ran 4 drafts" in error.why


def test_methods_without_a_length_by_batch() -> None:
    """vLLM's proposers of suffix and ngram_gpu, and TensorRT-LLM's NGram, have one length."""
    for engine, method, key in (
        ("vllm", "suffix", "num_speculative_tokens_per_batch_size"),
        ("vllm", "ngram_gpu", "num_speculative_tokens_per_batch_size"),
        ("trtllm", "NGram", "draft_len_schedule"),
    ):
        assert key not in engine_settings(engine, None, priced(), measured=COUNTED, method=method).settings
    assert "draft_len_schedule" in engine_settings("trtllm", None, priced(), measured=COUNTED, method="SA").settings


def test_sglang_adapts_by_batch() -> None:
    """Its file has the length of each batch from the first one on; other algorithms take one length."""
    found = engine_settings("sglang", None, priced(), measured=COUNTED, method="EAGLE3")
    note = next(note for note in found.notes if "--speculative-adaptive-config" in note)
    steps = read_adaptive(note.partition("FILE: ")[2])
    assert {batch: steps[max(first for first in steps if first <= batch)][0] for batch in COSTS} == {
        batch: budget.nodes - 1 for batch, budget in found.budgets.items()
    }
    assert found.settings["--speculative-num-steps"] in {length for lengths in steps.values() for length in lengths}
    for method in ("STANDALONE", "NGRAM"):
        other = engine_settings("sglang", None, priced(), measured=COUNTED, method=method)
        assert not any("adaptive" in note for note in other.notes)
