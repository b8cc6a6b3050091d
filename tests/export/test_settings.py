"""Settings of engines: the numbers are those of replay and profile, and what follows from neither is not guessed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from eagle_simulation import MadeUpDrafter, traces_of
from engine_settings import READERS
from helpers import random_calibration
from looped import looped
from priced import COSTS, COUNTED, priced
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.defaults import STEP_SIZES
from treeopt.drafter import Drafter
from treeopt.engines import SETTINGS
from treeopt.errors import Code, TreeoptError
from treeopt.export.settings import SETTINGS_OF, SYNTHETIC, engine_settings, promised
from treeopt.files.drafters import save_drafter
from treeopt.latency import LatencyProfile
from treeopt.optimize.chains import (
    acceptance_rates,
    chain_tokens,
    chains_by_batch,
    choose_dynamic_tree,
    replay_chain,
)
from treeopt.optimize.replay import replay
from treeopt.traces import NONE, StepTraces
from treeopt.tree import Tree

CHAINS = ("vllm", "trtllm", "llamacpp", "transformers", "chain")


def naive_best(calibration: Calibration, cost: float) -> int:
    """The number of drafts with the most tokens per second, by replay of each chain as a tree."""
    rates = [1.0]
    for drafts in range(1, calibration.num_heads + 1):
        chain = Tree.from_paths([(0,) * depth for depth in range(1, drafts + 1)])
        rates.append(replay(chain, calibration).tokens_per_step / (1 + cost * drafts))
    return max(range(len(rates)), key=rates.__getitem__)


def of_model(calibration: Calibration, folder: Path, drafter: Drafter | None = None) -> Calibration:
    """The same traces, as those of a draft model whose file is in the folder."""
    drafter = drafter or Drafter.model_only(4, 16, "d" * 16)
    save_drafter(drafter, folder / "d.safetensors", overwrite=True)
    file = str(folder / "d.safetensors")
    source = dataclasses.replace(calibration.provenance, drafter_id=drafter.id, drafter=file, heads="", heads_id="")
    return dataclasses.replace(calibration, provenance=source)


@pytest.fixture
def calibration() -> Calibration:
    return random_calibration(11, sequences=30)


@pytest.fixture(scope="module")
def stepwise() -> Calibration:
    return traces_of([MadeUpDrafter(seed, 40, 4, 5) for seed in range(4)])


def test_every_engine_has_settings() -> None:
    """The engines of the command line are those of the library."""
    assert tuple(SETTINGS_OF) == tuple(SETTINGS)


def test_lengths_are_the_fastest_at_each_batch(calibration: Calibration) -> None:
    """Each batch has the chain with the most tokens per second, found here by replay of trees."""
    best = chains_by_batch(chain_tokens(calibration), priced())
    lengths = {batch: budget.nodes - 1 for batch, budget in best.items()}
    assert lengths == {batch: naive_best(calibration, cost) for batch, cost in COSTS.items()}
    assert len(set(lengths.values())) > 2
    assert lengths[64] == 0


def test_vllm_with_one_length(calibration: Calibration, tmp_path: Path) -> None:
    """vLLM 0.32 stops with a table for Medusa heads: the smallest batch decides; one batch gives a length."""
    found, alone = (engine_settings("vllm", calibration, priced(costs)) for costs in (COSTS, {1: COSTS[1]}))
    length = naive_best(calibration, 0.05)
    assert found.settings == alone.settings == {"method": "medusa", "num_speculative_tokens": length}
    assert "one length" in found.underived["num_speculative_tokens_per_batch_size"]
    assert found.batch == 1
    assert not any("table" in note for note in found.notes)
    found = engine_settings("vllm", of_model(calibration, tmp_path), priced({1: 0.05}))
    assert "num_speculative_tokens_per_batch_size" not in found.settings
    assert "num_speculative_tokens_per_batch_size" in found.underived


def test_vllm_table_has_every_batch_once(calibration: Calibration, tmp_path: Path) -> None:
    """The table starts at batch 1, has no gap, and gives each measured batch its length, 0 included."""
    found = engine_settings("vllm", of_model(calibration, tmp_path), priced())
    config = json.loads(found.content)
    assert config == found.settings
    table = config["num_speculative_tokens_per_batch_size"]
    lengths = {batch: naive_best(calibration, cost) for batch, cost in COSTS.items()}
    covered = {batch: length for first, last, length in table for batch in range(first, last + 1)}
    assert sorted(covered) == list(range(1, 65))
    assert {batch: covered[batch] for batch in COSTS} == lengths
    assert covered[5] == lengths[16]
    assert config["num_speculative_tokens"] == max(lengths.values())
    assert config["method"] == "draft_model"
    assert "model" in found.underived


def test_tensorrt_schedule_ends_with_the_last_length(calibration: Calibration) -> None:
    """Keys are the last batch of each length; a length of 0 is left out, because it is what follows."""
    settings = engine_settings("trtllm", calibration, priced()).settings
    lengths = {batch: naive_best(calibration, cost) for batch, cost in COSTS.items()}
    assert settings["max_draft_len"] == max(lengths.values())
    schedule = settings["draft_len_schedule"]
    assert 64 not in schedule
    for batch, length in lengths.items():
        assert next((value for last, value in sorted(schedule.items()) if batch <= last), 0) == length


def test_tensorrt_schedule_is_one_that_it_accepts(calibration: Calibration) -> None:
    """The first length is max_draft_len and the greatest; where the smallest batch does not draft there is none."""
    settings = engine_settings("trtllm", calibration, priced({1: 0.4, 8: 0.05, 16: 0.4})).settings
    assert naive_best(calibration, 0.05) > naive_best(calibration, 0.4) == 1
    assert settings == {"max_draft_len": 1, "draft_len_schedule": {16: 1}}
    figures = engine_settings("trtllm", calibration, priced({1: 0.4, 8: 0.05, 16: 0.4})).budgets
    assert {batch: budget.nodes - 1 for batch, budget in figures.items()} == {1: 1, 8: 1, 16: 1}
    found = engine_settings("trtllm", calibration, priced({1: 3.0, 8: 0.05}))
    assert found.settings == {}
    assert "smallest batch" in found.underived["max_draft_len"]


def test_promise_is_of_the_smallest_batch_that_drafts(calibration: Calibration, tmp_path: Path) -> None:
    """vLLM's table may begin without drafts; the promise is of the first batch with some."""
    found = engine_settings("vllm", of_model(calibration, tmp_path), priced({1: 3.0, 8: 0.05, 16: 0.4}))
    assert found.settings["num_speculative_tokens_per_batch_size"][0] == [1, 1, 0]
    assert found.settings["num_speculative_tokens"] == naive_best(calibration, 0.05)
    assert found.batch == 8
    assert found.replay is not None
    assert found.replay.tokens_per_step == found.chains[naive_best(calibration, 0.05)]


@looped("engine", ["llamacpp", "transformers", "chain"])
def test_one_length_is_that_of_the_smallest_batch(engine: str, calibration: Calibration) -> None:
    """Engines without a table get the length of the smallest batch, be it shorter than others."""
    found = engine_settings(engine, calibration, priced({1: 0.4, 8: 0.05}))
    assert naive_best(calibration, 0.4) == 1
    assert 1 in found.settings.values()
    assert list(found.budgets) == [1]


def test_bounds_are_named(calibration: Calibration, stepwise: Calibration, tmp_path: Path) -> None:
    """The promise of a chain is exact, that of a tree exact or an estimate."""
    assert engine_settings("vllm", calibration, drafts=2).bound == "exact"
    stepwise = of_model(stepwise, tmp_path)
    bounds = {nodes: engine_settings("sglang", stepwise, nodes=nodes) for nodes in (2, 6, 30)}
    for nodes, found in bounds.items():
        algorithm, steps, top_k, _ = found.settings.values()
        assert algorithm == "STANDALONE"
        exact = steps == 1 or top_k == 1 or (top_k >= nodes - 1 and steps == 4)
        assert found.bound == ("exact" if exact else "estimate")
    assert len({found.bound for found in bounds.values()}) == 2


@looped("engine", CHAINS)
def test_length_is_not_guessed(engine: str, calibration: Calibration) -> None:
    """Without a profile no length is derived; a given one is taken, with its replay."""
    found = engine_settings(engine, calibration)
    assert (found.settings, found.content, found.replay) == ({}, "", None)
    assert any("--profile" in why for why in found.underived.values())
    given = engine_settings(engine, calibration, drafts=3)
    chain = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
    assert given.replay is not None
    assert given.replay.tokens_per_step == replay(chain, calibration).tokens_per_step == given.chains[3]
    assert 3 in given.settings.values()


@looped("engine", CHAINS)
def test_no_length_where_none_is_faster(engine: str, calibration: Calibration) -> None:
    """Where drafting never pays, no setting is written, and the reason is."""
    found = engine_settings(engine, calibration, priced({1: 3.0}))
    assert found.content == ""
    assert any("faster" in why for why in found.underived.values())


@looped("drafts", [5, 17, 200])
def test_length_beyond_the_traces_is_refused(drafts: int, calibration: Calibration) -> None:
    """Four levels are traced."""
    assert refusal_of(engine_settings, "chain", calibration, drafts=drafts).code is Code.TREE_TOO_DEEP


def test_no_text_is_refused() -> None:
    """A calibration without text promises nothing."""
    assert refusal_of(engine_settings, "chain", random_calibration(1).select([]), drafts=1).code is Code.PROMPTS_EMPTY


def test_sglang_options_are_a_command_line(stepwise: Calibration) -> None:
    """The options with their numbers, as SGLang counts them: the root is a draft token."""
    profile = dataclasses.replace(priced({1: 0.05}), provenance={"kind": "dynamic", "drafter": ""})
    found = engine_settings("sglang", stepwise, profile)
    words = shlex.split(found.content)
    options = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert options == found.settings
    best = choose_dynamic_tree(stepwise, profile)
    assert best.shape is not None
    assert tuple(options.values()) == (best.shape.steps, best.shape.top_k, best.shape.nodes)
    assert found.replay is not None
    assert best.budget is not None
    assert best.budget.tokens_per_second == pytest.approx(
        found.replay.tokens_per_step / (1 + 0.05 * (best.shape.nodes - 1))
    )
    assert best.budget.speedup > chain_tokens(stepwise).max() / (1 + 0.05 * 4) * 0.99


def test_nodes_are_counted_as_each_engine_does(stepwise: Calibration) -> None:
    """SGLang's chain has a node more than steps."""
    for nodes in (2, 3, 4, 5):
        settings = engine_settings("sglang", stepwise, nodes=nodes).settings
        assert settings["--speculative-eagle-topk"] > 1 or settings["--speculative-num-steps"] == nodes - 1


@looped("nodes", [1, 255])
def test_trees_beyond_the_traces_are_refused(nodes: int, stepwise: Calibration) -> None:
    """Places are traced up to 254 nodes."""
    assert refusal_of(engine_settings, "sglang", stepwise, nodes=nodes).code is Code.TREE_INVALID


def test_profile_of_another_drafter_is_refused(calibration: Calibration) -> None:
    """Steps of another drafter take other times."""
    profile = dataclasses.replace(priced(), provenance={"kind": "static", "drafter": "other"})
    for engine in ("vllm", "llamacpp"):
        assert refusal_of(engine_settings, engine, calibration, profile).code is Code.DRAFTER_MISMATCH


def test_method_of_a_draft_model(tmp_path: Path, calibration: Calibration) -> None:
    """The method is that of the drafter in the calibration, where its file is there and is the same one."""
    modelled = of_model(calibration, tmp_path)
    source = modelled.provenance
    assert engine_settings("vllm", modelled, drafts=2).settings["method"] == "draft_model"
    for changed in ({"drafter_id": "another"}, {"drafter": str(tmp_path / "gone.safetensors")}):
        other = dataclasses.replace(modelled, provenance=dataclasses.replace(source, **changed))
        found = engine_settings("vllm", other, drafts=2)
        assert "method" not in found.settings
        assert "method" in found.underived


def test_promise_is_of_the_drafts_that_were_made(calibration: Calibration) -> None:
    """An engine with another length than the settings is compared with a chain of its own length."""
    found = engine_settings("vllm", calibration, drafts=3)
    assert promised(found, calibration, 2).tokens_per_step == found.chains[2]
    assert promised(found, calibration, None).tokens_per_step == found.chains[3]
    assert refusal_of(promised, found, calibration, 9).code is Code.TREE_TOO_DEEP
    with pytest.raises(TreeoptError):
        promised(engine_settings("vllm", calibration), calibration, None)


HAVE = {
    "heads": {"vllm", "chain"},
    "model": {"vllm", "trtllm", "llamacpp", "transformers", "chain"},
    "ngram": {"chain"},
}


@looped("engine", CHAINS)
@looped("name", HAVE)
def test_figures_of_a_drafter_that_the_engine_lacks_are_not_exact(
    name: str, engine: str, calibration: Calibration, tmp_path: Path
) -> None:
    """They are marked as those of another drafter, and a warning says what the engine drafts with."""
    if name != "heads":
        drafter = Drafter.untrained(20, 4) if name == "ngram" else None
        calibration = of_model(calibration, tmp_path, drafter)
    found = engine_settings(engine, calibration, drafts=2)
    assert found.bound == ("exact" if engine in HAVE[name] else "other drafter")
    assert (name in found.warning and "drafts with" in found.warning) == (engine not in HAVE[name])


def test_trees_of_a_drafter_that_the_engine_lacks_are_not_exact(stepwise: Calibration, tmp_path: Path) -> None:
    """SGLang drafts trees with a draft model."""
    assert engine_settings("sglang", stepwise, nodes=2).bound == "other drafter"
    assert engine_settings("sglang", of_model(stepwise, tmp_path), nodes=2).bound == "exact"


def with_places(calibration: Calibration) -> Calibration:
    """The traces, with places of the true paths that rise from level to level."""
    places = 1 + np.cumsum(np.minimum(calibration.ranks, 30).astype(int), axis=1)
    node_rank = np.where(calibration.ranks == NONE, NONE, places).astype(np.uint8)
    sizes = np.ones((calibration.positions, len(STEP_SIZES)), np.float32)
    steps = StepTraces(node_rank, sizes, np.full(node_rank.shape, 0.5, np.float16))
    return dataclasses.replace(calibration, steps=steps)


@looped("levels, ranks, most", [(2, 5, 5 + 25 + 1), (1, 3, 4)])
def test_trees_beyond_the_candidates_are_refused(levels: int, ranks: int, most: int) -> None:
    """The error names the largest tree of the traced levels and ranks, and that one is exported."""
    made = with_places(random_calibration(3, sequences=8, heads=levels, top_k=ranks))
    assert engine_settings("sglang", made, nodes=most).settings["--speculative-num-draft-tokens"] == most
    for nodes in (most + 1, 70, 200):
        error = refusal_of(engine_settings, "sglang", made, nodes=nodes)
        assert error.code is Code.TREE_INVALID
        assert f"the largest tree has {most} nodes" in (error.why or "")


def test_sizes_of_a_profile_beyond_the_candidates_are_not_tried() -> None:
    """Two levels of three ranks have twelve candidates; the profile goes to 32 nodes, which cost nothing."""
    made = with_places(random_calibration(3, sequences=8, heads=2, top_k=3))
    found = engine_settings("sglang", made, of_dynamic_trees(priced({1: 1e-9}, 32)))
    assert 2 <= found.settings["--speculative-num-draft-tokens"] <= 13


def test_a_given_size_is_priced(stepwise: Calibration) -> None:
    """With a profile the figures of the size are those of its smallest batch."""
    found = engine_settings("sglang", stepwise, of_dynamic_trees(priced({2: 0.05, 4: 0.2})), nodes=6)
    assert found.replay is not None
    assert found.batch == 2
    assert found.budgets[2].speedup == pytest.approx(found.replay.tokens_per_step / 1.25)


def test_numbers_that_an_engine_does_not_take_are_refused(calibration: Calibration) -> None:
    """A length of trees, or a size of chains."""
    for engine in CHAINS:
        with pytest.raises(ValueError, match="takes no nodes"):
            engine_settings(engine, calibration, nodes=4)
    for changed in ({"drafts": 2}, {"method": "NGRAM"}):
        with pytest.raises(ValueError, match=r"no length|takes no nodes"):
            engine_settings("sglang", calibration, nodes=4, **changed)
    with pytest.raises(ValueError, match="needs a calibration"):
        engine_settings("sglang", None, nodes=4, measured=COUNTED)
    with pytest.raises(ValueError, match="method"):
        engine_settings("vllm", calibration, drafts=2, method="NGRAM")
    with pytest.raises(ValueError, match="need a calibration"):
        engine_settings("vllm", None, drafts=2)


def of_dynamic_trees(profile: LatencyProfile) -> LatencyProfile:
    """The profile, as one of per-step trees."""
    return dataclasses.replace(profile, provenance={"kind": "dynamic", "drafter": ""})


def test_a_given_length_is_kept_where_it_does_not_pay(stepwise: Calibration) -> None:
    """The length was given; only a search for the fastest may find that none is."""
    profile = of_dynamic_trees(priced({1: 50.0}))
    assert engine_settings("llamacpp", stepwise, profile).settings == {}
    found = engine_settings("llamacpp", stepwise, profile, drafts=2)
    assert found.settings["--spec-draft-n-max"] == 2
    assert found.budgets[1].speedup < 1


def test_promise_of_trees_is_their_own_replay(stepwise: Calibration) -> None:
    """An engine's histogram says nothing about trees, so no chain takes the place of what was replayed."""
    found = engine_settings("sglang", stepwise, nodes=8)
    for drafts in (1, 2, 9):
        assert promised(found, stepwise, drafts) is found.replay
    with pytest.raises(TreeoptError):
        promised(engine_settings("sglang", stepwise), stepwise, 2)


def test_sglang_takes_chains_of_a_calibration(calibration: Calibration, tmp_path: Path) -> None:
    """A given length is a tree with a top-k of 1, and its promise is that of the chain."""
    found = engine_settings("sglang", of_model(calibration, tmp_path), drafts=3)
    assert READERS["sglang"](found.content, "drafter")["--speculative-num-steps"] == 3
    assert found.settings["--speculative-algorithm"] == "STANDALONE"
    assert (found.bound, found.chain) == ("exact", True)
    assert found.tokens_per_step == found.chains[3]


def test_wide_trees_of_sglang_name_their_backends(stepwise: Calibration) -> None:
    """Above a top-k of 1, pages and attention backends are limited."""
    found = {nodes: engine_settings("sglang", stepwise, nodes=nodes) for nodes in (2, 16)}
    for one in found.values():
        wide = one.settings["--speculative-eagle-topk"] > 1
        assert any("page size 1" in note for note in one.notes) == wide
    assert found[16].settings["--speculative-eagle-topk"] > 1


@looped("engine", SYNTHETIC)
def test_synthetic_rates_are_those_of_replay(engine: str, calibration: Calibration, tmp_path: Path) -> None:
    """One for each draft, none above the one before, and no table of lengths beside them."""
    modelled = of_model(calibration, tmp_path)
    found = engine_settings(engine, modelled, priced())
    length = naive_best(calibration, 0.05)
    rates = acceptance_rates(replay_chain(calibration, length).histogram)
    made = READERS[engine](found.synthetic.content, "drafter")
    if engine == "vllm":
        assert made["synthetic_acceptance_rates"] == pytest.approx(rates, abs=1e-4)
        assert "num_speculative_tokens_per_batch_size" in found.settings
        assert "num_speculative_tokens_per_batch_size" not in made
        longer = engine_settings(engine, modelled, priced({1: 0.4, 8: 0.05})).synthetic  # the rates are of batch 1
        assert READERS[engine](longer.content, "drafter")["num_speculative_tokens"] == 1
    else:
        assert [float(rate) for rate in made["--spec-synth-rates"].split(",")] == pytest.approx(rates, abs=1e-4)


def test_synthetic_rates_are_refused_where_there_are_none(calibration: Calibration) -> None:
    """Other engines have no such setting; without a length there are no rates."""
    error = refusal_of(lambda: engine_settings("trtllm", calibration, drafts=2).synthetic)
    assert error.code is Code.TREE_NOT_EXPORTABLE
    assert "vllm or llamacpp" in error.fix
    assert refusal_of(lambda: engine_settings("vllm", calibration).synthetic).code is Code.PROFILE_INVALID


def test_given_method_replaces_the_one_of_the_drafter(calibration: Calibration, tmp_path: Path) -> None:
    """A method with another drafter than the calibration's is marked so."""
    modelled = of_model(calibration, tmp_path)
    found = engine_settings("vllm", modelled, drafts=2, method="eagle3")
    assert (found.settings["method"], found.bound) == ("eagle3", "other drafter")
    assert "drafts with an EAGLE head" in found.warning


def test_methods_without_trees_have_chains_of_a_calibration(stepwise: Calibration) -> None:
    """SGLang's block drafters and n-grams take no tree's numbers, also with step times."""
    profile = of_dynamic_trees(priced({1: 0.05}))
    for method, option in (("DFLASH", "--speculative-num-draft-tokens"), ("DSPARK", "--speculative-dspark-block-size")):
        found = engine_settings("sglang", stepwise, profile, method=method)
        assert set(found.settings) == {"--speculative-algorithm", option}
        assert found.chain
        assert found.bound == "other drafter"


def test_last_version_with_heads_is_named(calibration: Calibration) -> None:
    """vLLM 0.33 refuses the method medusa."""
    assert any("0.32 is the last" in note for note in engine_settings("vllm", calibration, drafts=2).notes)
