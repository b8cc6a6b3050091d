"""What engines refuse in settings, written from the rules in their sources (the versions are in treeopt/engines.py)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]


class RefusedError(ValueError):
    """The engine would stop, or ignore a setting."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise RefusedError(what)


def _rates(rates: Sequence[float], drafts: int) -> None:
    """The rules of synthetic acceptance rates, which vLLM and llama.cpp share."""
    _need(len(rates) == drafts, f"{len(rates)} rates, {drafts} drafts")
    _need(all(0.0 <= rate <= 1.0 for rate in rates), "rates beyond [0, 1]")
    _need(all(one >= other for one, other in itertools.pairwise(rates)), "rates rise")


def read_vllm(content: str, model: str = "") -> Settings:
    """--speculative-config of vLLM 0.33: vllm/config/speculative.py and vllm/v1/spec_decode/dynamic/utils.py."""
    config = json.loads(content)
    method, drafts = config.get("method"), config.get("num_speculative_tokens")
    known = {"method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
    known |= {"rejection_sample_method", "synthetic_acceptance_rates"}
    _need(set(config) <= known, f"unknown {set(config) - known}")
    methods = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "suffix", "ngram", "ngram_gpu")
    _need(method in methods, f"method {method}")
    _need(method in ("mtp", "dspark", "suffix", "ngram", "ngram_gpu") or model != "", "no speculative model")
    _need(isinstance(drafts, int) and drafts > 0, "num_speculative_tokens")
    synthetic = config.get("rejection_sample_method") == "synthetic"
    _need(synthetic == ("synthetic_acceptance_rates" in config), "rates and method of rejection")
    if synthetic:
        _rates(config["synthetic_acceptance_rates"], drafts)
    table = config.get("num_speculative_tokens_per_batch_size")
    if table is not None:
        _need(method not in ("ngram_gpu", "suffix"), "its proposer asserts one length")
        _need(bool(table) and table[0][0] == 1, "the first range begins at 1")
        _need(all(0 < first <= last and length >= 0 for first, last, length in table), "a range")
        _need(all(one[1] < other[0] for one, other in itertools.pairwise(table)), "ranges overlap")
    return dict(config)


def _options(content: str) -> dict[str, str]:
    words = content.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def read_sglang(content: str, model: str = "") -> Settings:
    """Options of SGLang 0.5.23: sglang/srt/arg_groups/speculative_hook.py."""
    given = _options(content)
    algorithm = given.pop("--speculative-algorithm", None)
    found = {name: int(value) for name, value in given.items()}
    _need(
        algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK"), f"algorithm {algorithm}"
    )
    _need(algorithm not in ("STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK") or model != "", "no draft model")
    names = {
        "NGRAM": {"--speculative-num-draft-tokens", "--speculative-ngram-max-bfs-breadth"},
        "DFLASH": {"--speculative-num-draft-tokens"},
        "DSPARK": {"--speculative-dspark-block-size"},
    }
    trees = {"--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"}
    _need(set(found) == names.get(str(algorithm), trees), f"options {set(found)}")  # steps need the other two
    _need(min(found.values()) > 0, "a number below 1")
    if found.get("--speculative-eagle-topk") == 1:
        _need(found["--speculative-num-draft-tokens"] == found["--speculative-num-steps"] + 1, "it would be changed")
    return {"--speculative-algorithm": algorithm, **found}


def read_adaptive(content: str) -> dict[int, list[int]]:
    """The file of --speculative-adaptive-config: sglang/srt/speculative/adaptive_spec_params.py."""
    found = {int(key): entry["candidate_steps"] for key, entry in json.loads(content).items()}
    for steps in found.values():
        _need(bool(steps) and all(type(step) is int and step >= 0 for step in steps), "candidate_steps")
    return found


def read_trtllm(content: str, model: str = "") -> Settings:
    """speculative_config of TensorRT-LLM: tensorrt_llm/llmapi/llm_args.py."""
    config = json.loads(content)
    kind, drafts = config.get("decoding_type"), config.get("max_draft_len")
    _need(set(config) <= {"decoding_type", "max_draft_len", "draft_len_schedule"}, "an unknown field")
    _need(kind in ("Draft_Target", "Eagle3", "MTP", "PARD", "DFlash", "SA", "NGram"), f"decoding_type {kind}")
    _need(kind in ("MTP", "SA", "NGram") or model != "", "no speculative_model")
    _need(isinstance(drafts, int) and drafts > 0, "max_draft_len")
    schedule = {int(batch): length for batch, length in config.get("draft_len_schedule", {}).items()}
    _need(not schedule or kind != "NGram", "no schedule for NGram")
    _need(not schedule or schedule[min(schedule)] == drafts, "the smallest batch has max_draft_len")
    _need(all(batch >= 1 and 0 <= length <= drafts for batch, length in schedule.items()), "a length")
    return dict(config)


def read_llamacpp(content: str, model: str = "") -> Settings:
    """Options of llama.cpp: common/arg.cpp and common/speculative.cpp in llama-cpp-python 0.3.36."""
    found = _options(content)
    kind = found.get("--spec-type", "none")
    drafts = {
        "ngram-mod": "--spec-ngram-mod-n-max",
        **{name: f"--spec-{name}-size-m" for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")},
        **dict.fromkeys(
            ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"), "--spec-draft-n-max"
        ),
    }
    _need(kind in drafts, f"--spec-type {kind}")
    _need(kind == "draft-mtp" or kind.startswith("ngram") or model != "", "no draft model")
    longest = int(found[drafts[kind]])
    _need(1 <= longest <= 1024, "the number of drafts")
    _need(int(found.get("--spec-draft-n-min", found.get("--spec-ngram-mod-n-min", "0"))) <= longest, "n-min")
    if "--spec-synth-rates" in found:
        _rates([float(rate) for rate in found["--spec-synth-rates"].split(",")], longest)
    others = {"--spec-type", "--spec-synth-rates", "--spec-draft-n-min", "--spec-draft-p-min", "--spec-ngram-mod-n-min"}
    _need(set(found) <= {drafts[kind], *others}, "an unknown option")
    return dict(found)


def read_transformers(content: str, model: str = "") -> Settings:
    """Fields of a generation config of transformers, which refuses unknown values of the schedule."""
    from transformers import GenerationConfig

    config = json.loads(content)
    made = GenerationConfig(**config)
    made.validate(strict=True)
    _need(all(getattr(made, name) == value for name, value in config.items()), "a setting is not kept")
    _need("prompt_lookup_num_tokens" in config or model != "", "no assistant model")
    return dict(config)


READERS: dict[str, Callable[[str, str], Settings]] = {
    "vllm": read_vllm,
    "sglang": read_sglang,
    "trtllm": read_trtllm,
    "llamacpp": read_llamacpp,
    "transformers": read_transformers,
}
