"""The draft model of the built-in model: `python bench/make_pocket_draft.py RECIPE FOLDER` (`make pocket-draft`).

A small Llama learns the next-token distributions of its target by Kullback-Leibler divergence (arXiv:1503.02531), on
the target's own greedy answers and on the text that the target was trained on, never on modules that it did not see.

Writes into FOLDER the draft model, in float16 and without the tokenizer, which is the target's, and `losses.json`; also
`seeds.jsonl` (openings from seen modules) and `answers.jsonl` (the target's continuations of these), which are not part
of the draft model. Finished steps are skipped, and an interrupted step continues.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from corpus import is_unseen, standard_library
from make_pocket import (
    AnswersPart,
    BasePart,
    CorpusPart,
    blocks,
    new_llama,
    run_recipe,
    trainer_arguments,
    write_openings,
)
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, PreTrainedModel, Trainer

from treeopt.files.atomic import write_text
from treeopt.files.strict_yaml import Schema
from treeopt.models.base import Base, load_base
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.train.data import load_texts
from treeopt.train.distill import distill

SCHEMA = "treeopt.draft-recipe/1"
_ROWS = 8  # texts of one forward of `judge`

Batch = Sequence[Tensor]  # token ids of texts, int64 [T]


class SeedsPart(Schema):
    """The openings that the target answers, from seen modules."""

    characters: int
    seeds: int


class MixturePart(Schema):
    """A step trains on `draft.sequences` blocks of text, or on this number of answers.

    In one pass over the blocks there are so many passes over the answers.
    """

    answers: int
    answer_passes: int


class JudgedPart(Schema):
    """The prompts by whose greedy answers the draft model is judged, and the length of these."""

    prompts: str
    max_new_tokens: int


class DraftRecipe(Schema):
    """The format `treeopt.draft-recipe/1`; the vocabulary of `draft` is that of the target."""

    schema_name: Literal["treeopt.draft-recipe/1"] = Field(alias="schema")
    target: str
    corpus: CorpusPart
    openings: SeedsPart
    answers: AnswersPart
    mixture: MixturePart
    draft: BasePart
    judged: JudgedPart


def make(recipe: DraftRecipe, folder: Path) -> None:
    """Write all files of the draft model into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = standard_library()
    unseen = [d for d in documents if is_unseen(d, recipe.corpus.unseen_one_in)]
    seen = [d for d in documents if not is_unseen(d, recipe.corpus.unseen_one_in)]
    target = load_base(recipe.target, dtype="float32", device="cpu")
    seeds, answers = folder / "seeds.jsonl", folder / "answers.jsonl"
    write_openings(seeds, seen, recipe.openings.characters, recipe.openings.seeds, recipe.draft.seed)
    if not answers.exists():
        resume = answers.with_name("answers.jsonl.partial").exists()
        distill(target, load_prompts(str(seeds)), answers, resume=resume, **recipe.answers.model_dump())
    seen_rows, unseen_rows = (
        list(blocks(target.tokenizer, [d.text for d in part], recipe.draft.context)) for part in (seen, unseen)
    )
    if not (folder / "model.safetensors").exists():
        examples = load_texts(target, [str(answers)], length=recipe.draft.context).examples
        texts = [torch.from_numpy(example.ids).long() for example in examples]
        train_draft(recipe, target, mixture(recipe, seen_rows, texts), folder)
    if not (folder / "losses.json").exists():
        draft = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        judged = {
            "seen": judge(target, draft, seen_rows[: len(unseen_rows)]),
            "unseen": judge(target, draft, unseen_rows),
            "answers": judge(target, draft, *answers_of(target, recipe.judged)),
        }
        figures = {f"{text}_{name}": value for text, found in judged.items() for name, value in found.items()}
        write_text(folder / "losses.json", json.dumps({"parameters": draft.num_parameters(), **figures}) + "\n")


def mixture(recipe: DraftRecipe, rows: Batch, texts: Batch) -> list[Batch]:
    """The batches of one pass: blocks of text, and the target's answers with their prompts, in random parts."""
    chance = random.Random(recipe.draft.seed)
    whole = _parts(rows, recipe.draft.sequences, chance)
    for _ in range(recipe.mixture.answer_passes):
        whole += _parts(texts, recipe.mixture.answers, chance)
    return whole


def _parts(texts: Batch, size: int, chance: random.Random) -> list[Batch]:
    mixed = chance.sample(list(texts), len(texts))
    return [mixed[start : start + size] for start in range(0, len(mixed), size)]


def train_draft(recipe: DraftRecipe, target: Base, batches: Sequence[Batch], folder: Path) -> None:
    """Train the draft model on batches of texts and save it; an interrupted run continues from its last checkpoint."""
    assert target.tokenizer is not None
    checkpoints = folder / "checkpoints"
    trainer = _DraftTrainer(
        model=new_llama(recipe.draft, target.tokenizer),
        args=trainer_arguments(recipe.draft, checkpoints, 1),
        train_dataset=_Batches(batches),
        data_collator=_as_inputs,
    )
    trainer.target = target.model
    trainer.train(resume_from_checkpoint=any(checkpoints.glob("checkpoint-*")))
    trainer.model.config.use_cache = True  # the Trainer sets it to False
    trainer.model.to(torch.float16).save_pretrained(folder)


class _Batches(Dataset[Batch]):
    """Batches as a torch data set: texts of similar length, so that there is little padding."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


def _as_inputs(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """One batch as inputs: ids, padded on the right, and the mask of the tokens, int64 [B, T]."""
    [texts] = batches
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": pad_sequence(list(texts), batch_first=True), "attention_mask": mask}


class _DraftTrainer(Trainer):
    """A Trainer whose loss is the divergence of the draft model from its target."""

    target: PreTrainedModel

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        # A causal model does not attend to padding on the right, so there is no attention mask.
        with torch.no_grad():
            logits = self.target(ids, use_cache=False).logits[mask]
        return divergence(logits, model(ids, use_cache=False).logits[mask]).mean()


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """KL(target || draft) in nats, float [n], of distributions given by logits [n, V]."""
    logprobs = target.float().log_softmax(-1)
    return (logprobs.exp() * (logprobs - draft.float().log_softmax(-1))).sum(-1)


def answers_of(target: Base, judged: JudgedPart) -> tuple[list[Tensor], list[int]]:
    """The target's greedy answers with their prompts (int64 [T]), and the number of tokens of each prompt."""
    prompts = encode_prompts(target, load_prompts(judged.prompts), judged.max_new_tokens).texts
    texts, _ = answer_all(target, prompts, AnswerOptions(max_new_tokens=judged.max_new_tokens, batch_size=64))
    return [torch.tensor(text.prompt + text.answer) for text in texts], [len(text.prompt) for text in texts]


@torch.inference_mode()
def judge(target: Base, draft: PreTrainedModel, texts: Batch, begins: Sequence[int] | None = None) -> dict[str, float]:
    """How near a draft model is to its target at the tokens of texts.

    Args:
        target: the target.
        draft: the draft model.
        texts: token ids, int64 [T].
        begins: index of the first token of each text that counts, 1 or more; None: of all, 1.

    Returns:
        `kl`: mean divergence in nats a token; `top1`: share of tokens where both have the same best token.
    """
    losses, same, tokens = [], 0, 0
    for start in range(0, len(texts), _ROWS):
        part = texts[start : start + _ROWS]
        inputs = _as_inputs([part])
        mask = inputs["attention_mask"].bool()
        for row, begin in enumerate(begins[start : start + _ROWS] if begins else [1] * len(part)):
            mask[row, : begin - 1] = False
            mask[row, len(part[row]) - 1 :] = False  # the last token predicts none of the text
        p, q = (model(inputs["input_ids"], use_cache=False).logits[mask] for model in (target.model, draft))
        losses.append(divergence(p, q).double().sum().item())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(p)
    return {"kl": math.fsum(losses) / tokens, "top1": same / tokens}


if __name__ == "__main__":
    run_recipe(__doc__ or "", DraftRecipe, SCHEMA, make)
