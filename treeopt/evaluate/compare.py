"""Compare: which method of speculative decoding pays for a model and prompts, all of them in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.comparison import CompareOptions, Comparison, Figures, Row, halves, spread_evenly
from treeopt.evaluate.contenders import Contender, Entry, Job, LeftOut, contenders
from treeopt.evaluate.divergence import ENDED, first_difference
from treeopt.evaluate.memory import memory_as_error
from treeopt.evaluate.metrics import Metrics, Trial
from treeopt.evaluate.runs import Runs, decode_all
from treeopt.models.base import Base
from treeopt.models.draft import as_draft
from treeopt.models.fit import check_heads_fit
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.progress import Progress, silent
from treeopt.texts.encode import Encoded, Text, encode_prompts
from treeopt.texts.given_prompts import GivenPrompts, as_prompt_set
from treeopt.texts.prompts import Prompt, PromptSet
from treeopt.verify.probe import check_trees


def compare(
    model: GivenModel,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    *,
    draft: GivenModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Comparison:
    """Decode prompts by every method of speculative decoding in turn, and compare tokens per step and speed.

    The methods are autoregressive decoding by our loop, stock `generate`, its prompt lookup and assisted generation,
    Token Recycling, the published tree mc_sim_7b_63 and the Medusa tree, and trees of each drafter, static and per
    step. All trees have the same number of nodes, but for published ones, and for one of each drafter that has the most
    tokens per second: cross-validated tokens per step over the seconds of a step, as in `learn_drafter`. What a method
    must learn it learns from other prompts than those that are judged; of prompts that equal learned ones none is
    judged.

    Args:
        model: a causal language model of transformers, a `Base`, or a folder or hub name, then loaded in float32.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None for none.
        prompts: as for `run_calibration`. The second half of each category is judged, and where `prompts_learn` is
            given, all. A later turn follows the answer of stock generate to the turn before.
        draft: a draft model with the same tokenizer, in the forms of `model`; None for none.
        tokenizer: the model's, where it is not in the folder of its weights.
        progress: called while methods learn, and after each text.
        options: fields of `CompareOptions`: `methods`, `nodes`, `sizes`, `texts`, `max_new_tokens`, `repeats`,
            `learn_limit`, `learn_tokens`, `seed`, `batch_size`, `chat_template`, `prompts_learn`.

    Returns:
        The rows; methods that cannot run have the reason in theirs.

    Raises:
        TreeoptError: as `run_calibration` and the loaders; E213 where the draft model has another tokenizer, E303 where
            no prompt is left to learn from or to judge, E502 where the model cannot verify trees.
        TypeError: where an argument has another type, or there is no such option.
        ValueError: where a number is out of range.

    Examples:
        >>> import treeopt
        >>> options = {"methods": ["lookup", "recycling"], "repeats": 1, "max_new_tokens": 16}
        >>> found = treeopt.compare("pocket", None, ["import os", "def f():", "class A:", "x = 1"], **options)
        >>> [row.method for row in found.rows if row.nodes == 16], found.learned
        (['token recycling'], 2)
    """
    chosen = CompareOptions(**options)
    base = as_base(model, tokenizer, dtype="float32")
    loaded = None if heads is None else as_heads(heads)
    if loaded is not None:
        check_heads_fit(base, loaded.heads, loaded.name)
    check_trees(base)
    given = as_prompt_set(prompts)
    learned = None if chosen.prompts_learn is None else as_prompt_set(chosen.prompts_learn)
    if learned is None:
        learned, given = halves(given)
    fitting = _fitting(base, learned, chosen)
    learned = dataclasses.replace(learned, prompts=tuple(spread_evenly(fitting, chosen.learn_limit)))
    encoded = encode_prompts(base, given, chosen.max_new_tokens, chat_template=chosen.chat_template)
    job = Job(base, loaded, as_draft(draft, base), learned, chosen, progress)
    texts = spread_evenly(_others(job, encoded), chosen.texts)
    job = dataclasses.replace(job, longest=_longest(texts, job))
    with memory_as_error("fewer new tokens, fewer nodes or a smaller batch"):
        entries = contenders(job)
        baselines = {one.name: one.baseline for one in entries if isinstance(one, Contender)}
        content = {one.name: one.content if isinstance(one, Contender) else one.why for one in entries}
        runs = decode_all(baselines, base, texts, chosen.decoding, progress, content=content)
        chosen.division.leader_only()
    return Comparison(
        rows=_rows(entries, runs, base),
        texts=runs.texts,
        learned=len(learned.prompts),
        dropped=len(encoded.texts) - len(_others(job, encoded)),
        skipped=(*encoded.skipped, *runs.skipped),
        repeats=chosen.repeats,
        made_by={
            **base.versions(),
            "threads": str(torch.get_num_threads()),
            "dtype": base.dtype_name,
            "attention": base.model.config._attn_implementation,
            **({"compiled": "yes"} if base.compile else {}),
        },
    )


def _fitting(base: Base, prompts: PromptSet, options: CompareOptions) -> list[Prompt]:
    """The prompts that fit into the context with the new tokens; E303 where there are none."""
    encoded = encode_prompts(base, prompts, options.max_new_tokens, chat_template=options.chat_template)
    known = {text.prompt_id for text in encoded.texts}
    return [prompt for prompt in prompts.prompts if prompt.id in known]


def _longest(texts: Sequence[Text], job: Job) -> int:
    """The tokens that a text may have; a dialogue may fill the context."""
    if any(text.later for text in texts):
        return job.base.context
    return max(len(text.prompt) for text in texts) + job.options.max_new_tokens


def _others(job: Job, encoded: Encoded) -> list[Text]:
    """The texts whose prompts are not among those to learn from; E303 where there are none."""
    options = job.options
    known = {
        tuple(text.prompt)
        for text in encode_prompts(
            job.base, job.prompts, options.max_new_tokens, chat_template=options.chat_template
        ).texts
    }
    others = [text for text in encoded.texts if tuple(text.prompt) not in known]
    if not others:
        what = f"all {len(encoded.texts)} prompts equal prompts that are learned, so none is judged"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="--prompts-learn with other prompts")
    return others


def _rows(entries: Sequence[Entry], runs: Runs, base: Base) -> tuple[Row, ...]:
    trials = tuple(
        Trial(text.prompt_id, text.category, text.turn, by_name)
        for text, by_name in zip(runs.texts, runs.by_text, strict=True)
    )
    return tuple(_row(entry, Metrics(trials), runs, base) for entry in entries)


def _row(entry: Entry, metrics: Metrics, runs: Runs, base: Base) -> Row:
    """The figures of one method, or why there are none."""
    name, exact = entry.name, base.dtype == torch.float32
    if isinstance(entry, LeftOut):
        return Row(name, None, left_out=entry.why)
    if name in runs.left_out:
        return Row(name, entry.nodes, left_out=runs.left_out[name])
    other = [
        (text, [run.tokens for run in by_name[name] if run.tokens != text.answer])
        for text, by_name in zip(runs.texts, runs.by_text, strict=True)
    ]
    differing = [(text, found[0]) for text, found in other if found]
    return Row(
        name,
        entry.nodes,
        Figures.of(metrics, name),
        len(runs.texts) - len(differing),
        {part: Figures.of(of_part, name) for part, of_part in metrics.by_category.items()},
        {turn: Figures.of(of_turn, name) for turn, of_turn in metrics.by_turn.items()},
        exact=exact,
        gaps=() if exact else tuple(_gaps(base, name, differing)),
    )


@torch.inference_mode()
def _gaps(base: Base, name: str, differing: Sequence[tuple[Text, Sequence[int]]]) -> Iterator[float]:
    """The difference of the logits of the two tokens where each text first differs, where neither has ended."""
    for text, tokens in differing:
        found = first_difference(text, name, tokens)
        if ENDED not in (found.greedy_token, found.found_token):
            prefix = torch.tensor([[*text.prompt, *text.answer[: found.position]]], device=base.device)
            logits = base.forward(prefix, use_cache=False, logits_to_keep=1)[0][0, -1].float()
            yield abs(float(logits[found.greedy_token] - logits[found.found_token]))
