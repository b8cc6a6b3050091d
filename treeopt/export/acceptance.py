"""Accepted drafts as an engine measured them.

Read are metrics of Prometheus as text, JSON or JSON lines with the records of requests or of the server, under the
names of vLLM, SGLang, TensorRT-LLM and llama.cpp, and the log of llama.cpp's server. Counts of records are added.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.read import parse_json, read_bytes
from treeopt.optimize.chains import MeasuredAcceptance, mean_acceptance

MOST_BYTES = 1 << 26
MOST_DRAFTS = 1 << 10
_MOST_STEPS = 1 << 53  # whole numbers of a float
# Steps by the number of accepted drafts: vLLM and TensorRT-LLM; SGLang, to its pull request 33518 and since.
_HISTOGRAMS = ("acceptance_histogram", "spec_accept_histogram", "spec_correct_drafts_histogram")
_BY_LENGTH = "acceptance_histogram_by_draft_length"  # of vLLM
_OF_VALIDATE = "predicted_acceptance_histogram"  # of `treeopt validate --json`
_STEPS = ("num_spec_steps", "spec_verify_ct")
# Mean tokens per step where there is no histogram: a request, the server, the server's metrics.
_MEANS = ("spec_accept_length", "avg_spec_accept_length")
_GAUGE = "sglang:spec_accept_length"
_COUNTER = "spec_decode_num_{}_total"  # after `vllm:` or `llamacpp:`
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?")
_POSITION = re.compile(r'(?:^|,)position="(\d{1,4})"')
_MODEL = re.compile(r'(?:^|,)model_name="([^"]*)"')
# A request in the log of llama.cpp's server since its pull request 24536: one line, and later two, of which the one
# with positions needs `--verbosity 4`.
_LOG = re.compile(
    r"draft acceptance = [\d.]+ \(\s*(\d{1,15}) accepted /\s*(\d{1,15}) generated\), "
    r"mean (?:acceptance length|len) =\s*([\d.]+)"
    r"(?:, acceptance rate per position = \(([\d., ]+)\)|[^\n]*\n[^\n]*acc per pos = \(([\d., ]+)\))?"
)


def read_acceptance(path: str | os.PathLike[str]) -> MeasuredAcceptance:
    """The accepted drafts in a file of an engine.

    Raises:
        TreeoptError: E201 where it is missing, E203 where it is damaged, holds no such record, or contradicts itself.
    """
    raw = read_bytes(path, MOST_BYTES)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid(path, "is not text in UTF-8") from error
    if "draft acceptance" in text:
        return _of_log(text, path)
    if not text.lstrip().startswith(("{", "[")):
        return _of_metrics(text, path)
    records = list(_records(_parsed(text, path)))
    if any(_OF_VALIDATE in record for record in records):
        raise _invalid(path, "is a result of treeopt validate, which has its own prediction beside each figure")
    histograms = [_histogram(record, path) for record in records if _key(record, _HISTOGRAMS)]
    if histograms:
        total = tuple(sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0))
        lengths = {length for record in records for length in _draft_lengths(record, path)}
        return _of_histogram(total, path, tuple(sorted(lengths)))
    means = [_number(record[key], key, path) for record in records if (key := _key(record, _MEANS))]
    return _of_means(means, path)


def _of_means(means: Sequence[float], path: str | os.PathLike[str]) -> MeasuredAcceptance:
    """One mean, or several equal ones; others cannot be put together."""
    if not means:
        raise _invalid(path, "has no record of accepted drafts")
    if len(set(means)) > 1:
        raise _invalid(path, f"has {len(means)} means and no histogram: their numbers of steps are not known")
    if not 1 <= means[0] <= MOST_DRAFTS:
        raise _invalid(path, f"has {means[0]} tokens per step; a step emits 1 or more")
    return MeasuredAcceptance(means[0], None)


def _of_log(text: str, path: str | os.PathLike[str]) -> MeasuredAcceptance:
    """The requests in the log of llama.cpp's server; shares have three decimals, so counts are nearly exact."""
    requests = _LOG.findall(text)
    if not all(one or other for *_, one, other in requests):
        return _of_means([_number(mean, "mean acceptance length", path) for _, _, mean, *_ in requests], path)
    reached: list[int] = []
    for accepted, generated, _, one, other in requests:
        rates = [_number(share.strip(), "acceptance rate", path) for share in (one or other).split(",")]
        if any(one < other for one, other in itertools.pairwise([1.0, *rates])):
            raise _invalid(path, "has acceptance rates that rise with the position")
        steps = round(int(accepted) / sum(rates)) if sum(rates) else -(-int(generated) // len(rates))
        counts = [steps, *(round(rate * steps) for rate in rates)]
        reached = [sum(column) for column in itertools.zip_longest(reached, counts, fillvalue=0)]
    if not reached:
        raise _invalid(path, "is a log of llama.cpp without a line of a request's drafts")
    return _of_histogram(tuple(one - other for one, other in itertools.pairwise([*reached, 0])), path)


def _of_metrics(text: str, path: str | os.PathLike[str]) -> MeasuredAcceptance:
    """The counters of vLLM or llama.cpp, or the gauge of SGLang, in metrics of Prometheus."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    means: list[float] = []
    models: set[str] = set()
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match is None or not match[1].startswith(("vllm:spec_decode_", "llamacpp:spec_decode_", _GAUGE)):
            continue
        value, name = _number(match[3], match[1], path), match[1].partition(":")[2]
        means += [value] if match[1] == _GAUGE else []  # one for each rank of tensor parallelism
        models.update(_MODEL.findall(match[2] or ""))
        position = _POSITION.search(match[2] or "")
        if name == _COUNTER.format("accepted_tokens_per_pos") and position:
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
        totals[name] = totals.get(name, 0.0) + value
    if len(models) > 1:
        raise _invalid(path, f"has counters of {len(models)} models ({', '.join(sorted(models))}): keep those of one")
    drafts, accepted = (totals.get(_COUNTER.format(name)) for name in ("drafts", "accepted_tokens"))
    if drafts is None or accepted is None:
        return _of_means(means, path)
    if not drafts:
        raise _invalid(path, "counts no step with drafts")
    if not positions:
        return _of_means([1 + accepted / drafts], path)
    if sorted(positions) != list(range(len(positions))):
        raise _invalid(path, f"has positions {sorted(positions)}, not 0, 1, ...")
    reached = [drafts, *(positions[i] for i in range(len(positions))), 0.0]
    if any(one < other for one, other in itertools.pairwise(reached)) or sum(reached[1:]) != accepted:
        raise _invalid(path, "has counts of positions that contradict those of drafts or accepted tokens")
    return _of_histogram(tuple(int(one - other) for one, other in itertools.pairwise(reached)), path)


def _parsed(text: str, path: str | os.PathLike[str]) -> Any:
    """A JSON document, or the list of those in its lines."""
    try:
        return parse_json(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            if len(lines) > 1:
                return [parse_json(line) for line in lines]
        except ValueError:
            pass
        raise _invalid(path, f"is not JSON: {first_line(error)}") from error


def _records(data: Any) -> Iterator[Mapping[str, Any]]:
    """The objects that hold accepted drafts, outermost first; what is inside of one is not searched."""
    waiting = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and _key(one, (*_HISTOGRAMS, *_MEANS)):
            yield one
        elif isinstance(one, (dict, list)):
            waiting += one.values() if isinstance(one, dict) else one


def _key(record: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of these names that the record has a value for."""
    return next((name for name in names if record.get(name) is not None), "")


def _histogram(record: Mapping[str, Any], path: str | os.PathLike[str]) -> list[int]:
    key = _key(record, _HISTOGRAMS)
    counts = record[key]
    whole = isinstance(counts, list) and all(type(count) is int and 0 <= count <= _MOST_STEPS for count in counts)
    if not whole or not 0 < len(counts) <= MOST_DRAFTS:
        raise _invalid(path, f"has a {key} that is not a list of counts")
    steps = _key(record, _STEPS)
    if steps and record[steps] != sum(counts):
        raise _invalid(path, f"has {sum(counts)} steps in {key} and {record[steps]!r} in {steps}")
    return list(counts)


def _draft_lengths(record: Mapping[str, Any], path: str | os.PathLike[str]) -> list[int]:
    """The numbers of drafts of a record's steps; empty where it does not state them."""
    stated = record.get(_BY_LENGTH, {})
    if not isinstance(stated, dict) or not all(re.fullmatch(r"[0-9]{1,4}", length) for length in stated):
        raise _invalid(path, f"has a {_BY_LENGTH} that is not by numbers of drafts")
    return [int(length) for length in stated]


def _number(value: Any, name: str, path: str | os.PathLike[str]) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else np.nan
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not 0 <= number < np.inf:
        raise _invalid(path, f"has {str(value)[:40]!r} as {name}")
    return float(number)


def _of_histogram(
    histogram: tuple[int, ...], path: str | os.PathLike[str], lengths: tuple[int, ...] = ()
) -> MeasuredAcceptance:
    if not sum(histogram):
        raise _invalid(path, "counts no step with drafts")
    return MeasuredAcceptance(mean_acceptance(histogram), histogram, lengths)


def _invalid(path: str | os.PathLike[str], what: str) -> TreeoptError:
    why = "read are JSON of vLLM, SGLang and TensorRT-LLM, metrics of vLLM, SGLang and llama.cpp, and logs of llama.cpp"
    return TreeoptError(Code.FILE_INVALID, f"{Path(path)} {what}", why=why, fix="see docs/engines/index.md")
