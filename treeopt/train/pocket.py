"""The built-in model, from a recipe: `python -m treeopt.train.pocket RECIPE FOLDER` (`make pocket`).

Writes into FOLDER the base model, its heads in `heads/`, `prompts.jsonl` (openings from unseen modules, part of the
built-in model) and `losses.json`; also `seeds.jsonl` (openings from seen modules) and `answers.jsonl` (the base's
continuations of these, on which the heads are trained), which are not part of the built-in model. Finished steps are
skipped, and an interrupted step continues.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from treeopt.files import strict_yaml
from treeopt.files.atomic import write_text
from treeopt.files.schemas import Schema, check
from treeopt.models.base import load_base
from treeopt.models.layouts import WEIGHT_FILES
from treeopt.texts.prompts import load_prompts
from treeopt.train.corpus import Document, is_unseen, openings, standard_library
from treeopt.train.data import load_texts
from treeopt.train.distill import distill
from treeopt.train.medusa1 import train_heads
from treeopt.train.pretrain import blocks, pretrain, train_tokenizer
from treeopt.train.settings import Settings

_SCHEMA = "treeopt.recipe/1"
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
