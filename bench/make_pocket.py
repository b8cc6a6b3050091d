"""The built-in model, from a recipe: `python bench/make_pocket.py RECIPE FOLDER` (`make pocket`).

Writes into FOLDER the base model, its heads in `heads/`, `prompts.jsonl` (openings from unseen modules, part of the
built-in model) and `losses.json`; also `seeds.jsonl` (openings from seen modules) and `answers.jsonl` (the base's
continuations of these, on which the heads are trained), which are not part of the built-in model. Finished steps are
skipped, and an interrupted step continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from corpus import Document, is_unseen, openings, standard_library
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from treeopt.files import strict_yaml
from treeopt.files.atomic import write_text
from treeopt.files.strict_yaml import Schema, check
from treeopt.models.base import load_base
from treeopt.models.head_files import WEIGHT_FILES
from treeopt.texts.prompts import load_prompts
from treeopt.train.data import load_texts
from treeopt.train.distill import distill
from treeopt.train.medusa1 import train_heads
from treeopt.train.settings import Settings

_SCHEMA = "treeopt.recipe/1"
END = "<|end|>"
_Form = TypeVar("_Form", bound=Schema)


class CorpusPart(Schema):
    """The split."""

    unseen_one_in: int


class BasePart(Schema):
    """The base model and its training."""

    vocab_size: int
    hidden_size: int
    layers: int
    intermediate_size: int
    attention_heads: int
    key_value_heads: int
    context: int
    sequences: int
    steps: int
    warmup_steps: int
    learning_rate: float
    weight_decay: float
    seed: int


class OpeningsPart(Schema):
    """Number and length of the openings."""

    characters: int
    built_in: int
    seeds: int


class AnswersPart(Schema):
    """How the base answers the seeds."""

    max_new_tokens: int
    batch_size: int


class HeadsPart(Schema):
    """How the heads are trained: fields of `train.settings.Settings`."""

    num_heads: int
    blocks: int
    shared_lm_head: bool
    epochs: float
    batch_size: int
    learning_rate: float
    holdout: int


class Recipe(Schema):
    """The format `treeopt.recipe/1`."""

    schema_name: Literal["treeopt.recipe/1"] = Field(alias="schema")
    corpus: CorpusPart
    base: BasePart
    openings: OpeningsPart
    answers: AnswersPart
    heads: HeadsPart


def make(recipe: Recipe, folder: Path) -> None:
    """Write all files of the built-in model into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = standard_library()
    unseen = [d for d in documents if is_unseen(d, recipe.corpus.unseen_one_in)]
    seen = [d for d in documents if not is_unseen(d, recipe.corpus.unseen_one_in)]
    for name, part, count in (
        ("prompts.jsonl", unseen, recipe.openings.built_in),
        ("seeds.jsonl", seen, recipe.openings.seeds),
    ):
        write_openings(folder / name, part, recipe.openings.characters, count, recipe.base.seed)
    if not (folder / "losses.json").exists():
        _make_base(recipe.base, [d.text for d in seen], [d.text for d in unseen], folder)
    base = load_base(str(folder))
    answers, heads = folder / "answers.jsonl", folder / "heads"
    if not answers.exists():
        distill(
            base,
            load_prompts(str(folder / "seeds.jsonl")),
            answers,
            resume=(folder / "answers.jsonl.partial").exists(),
            **recipe.answers.model_dump(),
        )
    if not (heads / WEIGHT_FILES[0]).exists():
        texts = load_texts(base, [str(answers)], length=recipe.base.context)
        settings = Settings(**recipe.heads.model_dump())
        train_heads(base, texts, heads, settings, resume=(heads / "checkpoints").exists())


def _make_base(settings: BasePart, seen: Sequence[str], unseen: Sequence[str], folder: Path) -> None:
    """Tokenizer and base model, from the texts of seen modules alone."""
    tokenizer = train_tokenizer(seen, settings.vocab_size, settings.context)
    seen_rows, unseen_rows = (blocks(tokenizer, texts, settings.context) for texts in (seen, unseen))
    losses = pretrain(settings, tokenizer, seen_rows, unseen_rows, folder)
    tokens = {"seen_tokens": seen_rows.numel(), "unseen_tokens": unseen_rows.numel()}
    write_text(folder / "losses.json", json.dumps({**tokens, **losses}) + "\n")


def train_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose token 0 ends a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END, model_max_length=context)


def blocks(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], length: int) -> Tensor:
    """int64 [n, length]: the texts, each with its end token, concatenated; an incomplete last block is dropped."""
    end = [tokenizer.eos_token_id]
    ids = [token for row in tokenizer(list(texts), verbose=False).input_ids for token in row + end]
    whole = len(ids) // length * length
    return torch.tensor(ids[:whole]).view(-1, length)


def pretrain(
    settings: Any, tokenizer: PreTrainedTokenizerFast, seen: Tensor, unseen: Tensor, folder: str | os.PathLike[str]
) -> dict[str, float]:
    """Train a Llama on token blocks, save it with its tokenizer, and return its losses.

    Args:
        settings: the `base` part of a recipe.
        tokenizer: saved beside the model; its end token ends texts.
        seen: int64 [n, context], for training.
        unseen: int64 [m, context], for evaluation.
        folder: for checkpoints and the model; an interrupted run continues from its last checkpoint.

    Returns:
        Mean loss in nats a token: `train_loss` over the first blocks trained on, `unseen_loss` over `unseen`.
    """
    model = new_llama(settings, tokenizer)
    checkpoints = Path(folder) / "checkpoints"
    arguments = trainer_arguments(settings, checkpoints, settings.sequences)
    trainer = Trainer(model=model, args=arguments, train_dataset=TensorDataset(seen), data_collator=_as_inputs)
    trainer.train(resume_from_checkpoint=any(checkpoints.glob("checkpoint-*")))
    model.config.use_cache = True  # the Trainer sets it to False
    model.to(torch.bfloat16).save_pretrained(folder)  # half the bytes
    tokenizer.save_pretrained(folder)
    # Losses of the saved model: in rounded weights, and without the mixed precision of training.
    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {"train_loss": mean_loss(saved, seen[: len(unseen)]), "unseen_loss": mean_loss(saved, unseen)}


def new_llama(settings: Any, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama of the sizes of a recipe's `BasePart`, with random weights; this seeds all random generators."""
    set_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=settings.attention_heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def trainer_arguments(settings: Any, checkpoints: Path, batch_size: int) -> TrainingArguments:
    """Arguments of a Trainer for a recipe's `BasePart`; `batch_size` counts rows of its data set."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=batch_size,
        max_steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="cosine",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
        logging_steps=50,
        save_steps=250,
        save_total_limit=1,
        report_to=[],
    )


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Nats a token over token blocks [n, length]."""
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in torch.split(rows, 8)]
    return math.fsum(losses) / len(rows)


def _as_inputs(rows: Sequence[tuple[Tensor]]) -> dict[str, Tensor]:
    """A batch of token blocks as inputs of the model."""
    ids = torch.stack([row for (row,) in rows])
    return {"input_ids": ids, "labels": ids}


def write_openings(path: Path, documents: Sequence[Document], characters: int, count: int, seed: int) -> None:
    """Write random openings, one a line."""
    rows = [json.dumps(row) for row in draw(documents, characters, count, seed)]
    write_text(path, "\n".join(rows) + "\n")


def draw(documents: Sequence[Document], characters: int, count: int, seed: int) -> list[dict[str, str]]:
    """Random openings, in the order of their documents."""
    found = [{"text": text, "from": d.name} for d in documents for text in openings(d, characters)]
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[i] for i in sorted(chosen)]


def run_recipe(about: str, form: type[_Form], schema: str, run: Callable[[_Form, Path], None]) -> None:
    """Run the recipe that the command line names.

    Args:
        about: description of the program.
        form: of the recipe.
        schema: name of the form.
        run: makes the files of a recipe in a folder.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    run(check(strict_yaml.load(given.recipe), form, schema), given.folder)


if __name__ == "__main__":
    run_recipe(__doc__ or "", Recipe, _SCHEMA, make)
