"""Accepted drafts of engines: their files are read, damaged ones are refused, and they are compared with replay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.export.acceptance import read_acceptance
from treeopt.optimize.chains import AcceptanceComparison, MeasuredAcceptance, compare_acceptance, replay_chain
from treeopt.optimize.intervals import Interval

# The example of vLLM's documentation, and one of a pull request of SGLang.
VLLM = {
    "choices": [],
    "metrics": {
        "speculative_decoding": {
            "mean_acceptance_length": 1.2325581395348837,
            "acceptance_histogram": [39, 1, 0, 3],
            "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
            "num_spec_steps": 43,
            "num_accepted_draft_tokens": 10,
            "num_draft_tokens": 129,
            "num_spec_tokens": 3,
        }
    },
}
SGLANG = {
    "meta_info": {
        "completion_tokens": 106,
        "spec_accept_length": 2.4651162790697674,
        "spec_verify_ct": 43,
        "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
    }
}
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 43.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 129.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 3.0
vllm:prompt_tokens_total{engine="0"} NaN
"""
# Of llama.cpp's server: to and from the change that moved the positions to a line of their own.
LOG = """0.16 I slot print_timing: id  0 | task 42 |    graphs reused =        132
0.16 I slot print_timing: id  0 | task 42 | draft acceptance = 0.65625 (  105 accepted /   160 generated), \
mean acceptance length =  3.62, acceptance rate per position = (0.800, 0.700, 0.625, 0.500)
0.16 I statistics        draft-mtp: #calls(b,g,a) =    2    134    134, #acc rate/pos = (0.813, 0.716, 0.619, 0.493)
"""
LATER = """1.2 I slot print_timing: id  1 | draft acceptance = 0.50000 (   10 accepted /    20 generated), mean len = \
 2.00
1.2 T slot print_timing: id  1 | task 3 |      acc per pos = (0.700, 0.300)
"""


def write(folder: Path, content: Any) -> Path:
    """A file with this text, or this object as JSON."""
    file = folder / "measured"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_vllm_responses(tmp_path: Path) -> None:
    """One response, a list and JSON lines; counts of requests are added, each once."""
    one = read_acceptance(write(tmp_path, VLLM))
    assert one.histogram == (39, 1, 0, 3)
    assert one.draft_lengths == (3,)
    assert one.mean_acceptance_length == VLLM["metrics"]["speculative_decoding"]["mean_acceptance_length"]  # type: ignore[index]
    longer = {"acceptance_histogram": [1, 1, 1, 1, 2]}
    for content in ([VLLM, longer], f"{json.dumps(VLLM)}\n\n{json.dumps(longer)}\n"):
        assert read_acceptance(write(tmp_path, content)).histogram == (40, 2, 1, 4, 2)


def test_vllm_metrics(tmp_path: Path) -> None:
    """The counters by position give the histogram of the same steps; several engines are added, several models not."""
    found = read_acceptance(write(tmp_path, METRICS))
    assert found.histogram == (39, 1, 0, 3)
    assert found.mean_acceptance_length == pytest.approx(1 + 10 / 43)
    both = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert read_acceptance(write(tmp_path, both)).histogram == (78, 2, 0, 6)
    with pytest.raises(TreeoptError, match=r"counters of 2 models \(m, other\): keep those of one"):
        read_acceptance(write(tmp_path, METRICS + METRICS.replace('model_name="m"', 'model_name="other"')))


def test_llamacpp_metrics(tmp_path: Path) -> None:
    """llama.cpp counts under the names of vLLM, with its own prefix."""
    text = (
        METRICS.replace("vllm:", "llamacpp:")
        .replace('engine="0",model_name="m",', "")
        .replace('{engine="0",model_name="m"}', "")
    )
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 3.0' in text
    assert "llamacpp:spec_decode_num_drafts_total 43.0" in text
    assert read_acceptance(write(tmp_path, text)).histogram == (39, 1, 0, 3)


def test_llamacpp_logs(tmp_path: Path) -> None:
    """The counts of 40 steps are rebuilt from shares, in both forms of the line; requests are added."""
    assert read_acceptance(write(tmp_path, LOG)).histogram == (8, 4, 3, 5, 20)
    assert read_acceptance(write(tmp_path, LATER)).histogram == (3, 4, 3)
    assert read_acceptance(write(tmp_path, LOG + LATER)).histogram == (11, 8, 6, 5, 20)
    nothing = LATER.replace("10 accepted", "0 accepted").replace("0.700, 0.300", "0.000, 0.000")
    assert read_acceptance(write(tmp_path, nothing)).histogram == (10, 0, 0)


def test_llamacpp_log_without_positions(tmp_path: Path) -> None:
    """At the usual verbosity the mean alone is in the log."""
    mean = LATER.splitlines()[0] + "\n"
    assert read_acceptance(write(tmp_path, mean)) == MeasuredAcceptance(2.0, None)
    with pytest.raises(TreeoptError, match="has 2 means and no histogram"):
        read_acceptance(write(tmp_path, mean + mean.replace("2.00", "3.00")))


def test_means_without_positions(tmp_path: Path) -> None:
    """Without positions the mean alone is known; different means of ranks cannot be put together."""
    found = read_acceptance(write(tmp_path, "\n".join(line for line in METRICS.splitlines() if "per_pos" not in line)))
    assert found == MeasuredAcceptance(1 + 10 / 43, None)
    assert read_acceptance(write(tmp_path, RANKS)) == MeasuredAcceptance(2.5, None)
    means = [{"spec_accept_length": 2.0}, {"spec_accept_length": 2.0}]
    assert read_acceptance(write(tmp_path, means)) == MeasuredAcceptance(2.0, None)
    with pytest.raises(TreeoptError, match="has 2 means and no histogram"):
        read_acceptance(write(tmp_path, RANKS.replace("2.5\n", "3.5\n", 1)))


def test_sglang_records(tmp_path: Path) -> None:
    """A request's histogram, under both of its names, and the mean of the server."""
    assert read_acceptance(write(tmp_path, SGLANG)).histogram == (11, 14, 11, 4, 0, 3)
    assert read_acceptance(write(tmp_path, SGLANG)).mean_acceptance_length == pytest.approx(1 + 63 / 43)
    assert read_acceptance(write(tmp_path, {"meta_info": {"spec_accept_histogram": [5, 0, 0, 10]}})).histogram == (
        5,
        0,
        0,
        10,
    )
    server = {"internal_states": [{"avg_spec_accept_length": 2.5}], "version": "0.5"}
    assert read_acceptance(write(tmp_path, server)) == MeasuredAcceptance(2.5, None)
    gauge = 'sglang:spec_accept_length{model_name="m"} 2.25\n'
    assert read_acceptance(write(tmp_path, gauge)) == MeasuredAcceptance(2.25, None)


RANKS = """sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.5
sglang:spec_accept_length{model_name="m",tp_rank="1"} 2.5
"""


def test_figures_of_several_records(tmp_path: Path) -> None:
    """Numbers of drafts are joined; other counters of vLLM are no means; a mean may be 1."""
    other = {"acceptance_histogram": [1, 1], "acceptance_histogram_by_draft_length": {"1": [1, 0], "2": [0, 1]}}
    assert read_acceptance(write(tmp_path, [VLLM, other])).draft_lengths == (1, 2, 3)
    assert read_acceptance(write(tmp_path, {"spec_accept_length": 1})) == MeasuredAcceptance(1.0, None)
    assert read_acceptance(write(tmp_path, {"acceptance_histogram": [0, 1]})) == MeasuredAcceptance(2.0, (0, 1))
    rising = METRICS.replace('position="0"} 4.0', 'position="0"} 3.0').replace('position="1"} 3.0', 'position="1"} 4.0')
    with pytest.raises(TreeoptError, match="counts of positions that contradict"):
        read_acceptance(write(tmp_path, rising))
    with pytest.raises(TreeoptError, match="has no record of accepted drafts"):
        read_acceptance(write(tmp_path, 'vllm:spec_decode_num_draft_tokens_total{engine="0"} 5\n'))


def test_ends_of_the_interval_are_as_promised() -> None:
    """A figure at either end lies in the interval; without an interval nothing is said."""
    for measured, expected in ((1.4, False), (1.5, True), (2.0, True), (2.5, True), (2.6, False)):
        assert AcceptanceComparison(2.0, Interval(1.5, 2.5), measured, (), None).as_promised is expected
    assert AcceptanceComparison(2.0, None, 2.0, (), None).as_promised is None


HOSTILE: list[Any] = [
    {"acceptance_histogram": [1, 2], "predicted_acceptance_histogram": [2, 1]},
    "",
    "nothing of interest\n",
    "{",
    "[" * 100_000,
    {"a": 1},
    [],
    {"acceptance_histogram": []},
    {"acceptance_histogram": [0, 0]},
    {"acceptance_histogram": [1, -1]},
    {"acceptance_histogram": [1.5, 2]},
    {"acceptance_histogram": [True, 2]},
    {"acceptance_histogram": {"0": 1}},
    {"acceptance_histogram": [1] * 5000},
    {"acceptance_histogram": [1, 2], "num_spec_steps": 4},
    {"acceptance_histogram": [1, 2], "acceptance_histogram_by_draft_length": [1]},
    {"acceptance_histogram": [1, 2], "acceptance_histogram_by_draft_length": {"x": [1]}},
    {"acceptance_histogram": [1, 2], "acceptance_histogram_by_draft_length": {"9999999999": [1]}},
    {"spec_correct_drafts_histogram": [1, 2], "spec_verify_ct": "3"},
    {"avg_spec_accept_length": "many"},
    {"avg_spec_accept_length": 0.5},
    {"avg_spec_accept_length": 1e9},
    {"avg_spec_accept_length": True},
    [{"spec_accept_length": 2.0}, {"spec_accept_length": 3.0}],
    '{"avg_spec_accept_length": NaN}',
    '{"avg_spec_accept_length": 1e999}',
    LOG.replace("0.800", "0.400"),
    LOG.replace("0.800", "1.800"),
    LOG.replace("0.800", "0.8.0"),
    LOG.replace("accepted", "taken"),
    LATER.splitlines()[0].replace("2.00", "0.50"),
    METRICS.replace("43.0", "0.0"),
    METRICS.replace("43.0", "3.0"),
    METRICS.replace("43.0", "nan"),
    METRICS.replace("43.0", "-1"),
    METRICS.replace("43.0", "1e400"),
    METRICS.replace("} 43.0", "} x"),
    METRICS.replace(" 10.0", " 11.0"),
    METRICS.replace('position="1"', 'position="7"'),
    METRICS.replace('position="2"} 3.0', 'position="2"} 4.0'),
    METRICS.replace("accepted_tokens_total", "something_total"),
]


@looped("content", HOSTILE)
def test_damaged_files_are_one_error(tmp_path: Path, content: Any) -> None:
    """A file without such a record, or with one that contradicts itself, is refused with its name."""
    if content == METRICS:
        pytest.fail("the fault was not planted")
    file = write(tmp_path, content)
    error = refusal_of(read_acceptance, file)
    assert error.code is Code.FILE_INVALID
    assert str(file) in error.what
    assert len(error.what) < 500


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Binary files, folders and files that are not there."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, code in (("binary", Code.FILE_INVALID), ("", Code.FILE_INVALID), ("gone", Code.FILE_MISSING)):
        assert refusal_of(read_acceptance, tmp_path / name).code is code


def test_replay_compared_with_itself() -> None:
    """The steps of a replay are as promised, with equal rates at every depth."""
    calibration = random_calibration(4, sequences=30)
    replay = replay_chain(calibration, 3)
    ends = set((calibration.offsets[1:] - 1).tolist())
    counts = [0, 0, 0, 0]
    for position, (visited, accepted) in enumerate(zip(replay.visited, replay.accepted.tolist(), strict=True)):
        counts[accepted] += bool(visited) and position not in ends
    mean = 1 + (counts[1] + 2 * counts[2] + 3 * counts[3]) / sum(counts)
    found = compare_acceptance(replay, calibration, MeasuredAcceptance(mean, tuple(counts)))
    assert found.promised == pytest.approx(mean)
    assert found.as_promised is True
    assert found.measured_rates == pytest.approx(found.promised_rates)
    assert found.promised_rates[0] == pytest.approx(1 - counts[0] / sum(counts))
    assert found.promised_rates[2] == pytest.approx(counts[3] / sum(counts))


@looped("factor, expected", [(1.0, True), (0.6, False), (1.6, False)])
def test_other_acceptance_is_reported(factor: float, expected: bool) -> None:
    """A figure outside the interval of the promise is not as predicted."""
    calibration = random_calibration(4, sequences=30)
    replay = replay_chain(calibration, 3)
    found = compare_acceptance(replay, calibration, MeasuredAcceptance(replay.tokens_per_step * factor, None))
    assert found.as_promised is expected
    assert found.measured_rates is None


def test_interval_is_that_of_as_many_steps() -> None:
    """An engine that served a fourth of the steps has about twice the spread of one that served four times as many."""
    calibration = random_calibration(4, sequences=100)
    replay = replay_chain(calibration, 3)
    histogram = np.array(replay.histogram)

    def spread(times: float) -> float:
        found = compare_acceptance(replay, calibration, MeasuredAcceptance(2.0, tuple((histogram * times).astype(int))))
        assert found.interval is not None
        return found.interval.high - found.interval.low

    assert spread(0.0625) == pytest.approx(spread(1.0) * np.sqrt(17 / 2), rel=0.15)
    whole = compare_acceptance(replay, calibration, MeasuredAcceptance(2.0, None)).interval
    assert whole is not None
    assert spread(1.0) == pytest.approx(whole.high - whole.low, rel=0.02)


def test_interval_is_of_the_promised_figure() -> None:
    """With many short texts, whose last roots need no forward, the promise is still inside of its interval."""
    calibration = make_calibration([np.zeros((3, 2), int) + s % 2 for s in range(400)])
    calibration = dataclasses.replace(calibration, token_hashes=tuple(map(str, range(400))))
    replay = replay_chain(calibration, 1)
    found = compare_acceptance(replay, calibration, MeasuredAcceptance(1.5, None))
    # Texts of three tokens: right drafts give steps of 2 and 1 (no forward), wrong ones 1, 1 and 1 (no forward).
    assert found.promised == pytest.approx(1 + 200 / 600)
    assert found.interval is not None
    assert found.interval.low < found.promised < found.interval.high
    assert replay.tokens_per_step == pytest.approx(1200 / 1000)
    assert found.interval.low > 1200 / 1000


def test_one_text_has_no_interval() -> None:
    """Without an interval there is no verdict."""
    table = random_calibration(4, sequences=1, length=30).ranks
    calibration = make_calibration([table % 3])
    found = compare_acceptance(replay_chain(calibration, 2), calibration, MeasuredAcceptance(2.0, None))
    assert found.interval is None
    assert found.as_promised is None


def test_shares_of_a_log_are_rounded_to_counts(tmp_path: Path) -> None:
    """Shares have three decimals: 87 steps of which 70, 55 and 42 accept 1, 2 and 3 drafts or more."""
    line = (
        "slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), "
        "mean acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)\n"
    )
    assert read_acceptance(write(tmp_path, line)).histogram == (17, 15, 13, 42)
