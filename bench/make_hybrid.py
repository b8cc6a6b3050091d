"""A small hybrid of recurrent and attention layers: `python bench/make_hybrid.py RECIPE FOLDER [--minutes N]`.

A Qwen3.5 text model of stock transformers, whose linear-attention layers keep a recurrent state, learns the next-token
distributions of its target by Kullback-Leibler divergence (arXiv:1503.02531) on the text that the target was trained
on. It begins with the target's embeddings and has the target's tokenizer.

Writes into FOLDER the model in bfloat16, the tokenizer, and `losses.json`. `training.pt` is the state of an unfinished
run: an interrupted run, or one that has used its minutes, goes on from there. It is not part of the model.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from corpus import is_unseen, standard_library
from make_pocket import CorpusPart, blocks, mean_loss
from make_pocket_draft import divergence, judge
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from treeopt.files import strict_yaml
from treeopt.files.atomic import write_bytes, write_text
from treeopt.files.strict_yaml import Schema, check
from treeopt.models.base import Base, load_base

SCHEMA = "treeopt.hybrid-recipe/1"


class HybridPart(Schema):
    """The sizes of the model; hidden size, vocabulary and context are the target's."""

    intermediate_size: int
    layers: list[Literal["linear_attention", "full_attention"]]
    attention_heads: int
    key_value_heads: int
    head_size: int
    linear_heads: int
    linear_key_size: int
    linear_value_size: int


class TrainingPart(Schema):
    """How it is trained; the learning rate is constant between its first and its last steps."""

    length: int
    sequences: int
    steps: int
    warmup_steps: int
    decay_steps: int
    learning_rate: float
    weight_decay: float
    checkpoint_steps: int
    watched: int
    judged: int
    seed: int


class HybridRecipe(Schema):
    """The format `treeopt.hybrid-recipe/1`."""

    schema_name: Literal["treeopt.hybrid-recipe/1"] = Field(alias="schema")
    target: str
    corpus: CorpusPart
    hybrid: HybridPart
    training: TrainingPart


def make(recipe: HybridRecipe, folder: Path, minutes: float = 100.0) -> bool:
    """Train the model and write its files into a folder; finished steps are skipped.

    Returns:
        False where the minutes were used before the last step: call again to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "losses.json").exists():
        return True
    target = load_base(recipe.target, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    documents, one_in = standard_library(), recipe.corpus.unseen_one_in
    seen, unseen = (
        blocks(target.tokenizer, [d.text for d in documents if is_unseen(d, one_in) is side], recipe.training.length)
        for side in (False, True)
    )
    model = new_hybrid(recipe, target)
    watched = spread(unseen, recipe.training.watched)
    if not train(recipe.training, target.model, model, seen, watched, folder, minutes):
        return False
    model.to(torch.bfloat16).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    # Losses of the saved model, in rounded weights.
    saved = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    figures: dict[str, float] = {"parameters": saved.num_parameters()}
    for name, found_in in (("seen", seen), ("unseen", unseen)):
        rows = spread(found_in, recipe.training.judged)
        found = {"loss": mean_loss(saved, rows), "target_loss": mean_loss(target.model, rows)}
        figures |= {f"{name}_{kind}": value for kind, value in (found | judge(target, saved, list(rows))).items()}
    write_text(folder / "losses.json", json.dumps(figures) + "\n")
    return True


def spread(rows: Tensor, count: int) -> Tensor:
    """At most so many of the rows, at equal distances, so that they are of many modules."""
    return rows[:: -(-len(rows) // count)]


def new_hybrid(recipe: HybridRecipe, target: Base) -> Qwen3_5ForCausalLM:
    """The model with the target's embeddings and otherwise random weights; this seeds all random generators."""
    set_seed(recipe.training.seed)
    sizes, of_target = recipe.hybrid, target.model.config
    config = Qwen3_5TextConfig(
        vocab_size=of_target.vocab_size,
        hidden_size=of_target.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=len(sizes.layers),
        layer_types=sizes.layers,
        num_attention_heads=sizes.attention_heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_size,
        linear_num_key_heads=sizes.linear_heads,
        linear_num_value_heads=sizes.linear_heads,
        linear_key_head_dim=sizes.linear_key_size,
        linear_value_head_dim=sizes.linear_value_size,
        max_position_embeddings=of_target.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=of_target.eos_token_id,
        pad_token_id=of_target.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    model.get_input_embeddings().weight.data.copy_(target.model.get_input_embeddings().weight)
    return model


def train(
    settings: TrainingPart,
    target: PreTrainedModel,
    model: PreTrainedModel,
    seen: Tensor,
    watched: Tensor,
    folder: Path,
    minutes: float,
) -> bool:
    """Train on blocks int64 [n, length], in a new random order in each pass; True after the last step.

    A line is printed at each checkpoint: step, passes, divergence on the text trained on since the line before,
    divergence and top-1 agreement on `watched` (int64 [w, length]), and tokens a second.
    """
    state = folder / "training.pt"
    # Norms, decay rates and biases, which have fewer than two dimensions, are not drawn to 0.
    groups = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    decays = (settings.weight_decay, 0.0)
    optimizer = torch.optim.AdamW(
        [{"params": part, "weight_decay": decay} for part, decay in zip(groups, decays, strict=True)],
        betas=(0.9, 0.95),
        fused=True,
    )
    step, began = 0, time.monotonic()
    if state.exists():
        kept = torch.load(state, weights_only=True)
        step = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    per_pass, losses, since = len(seen) // settings.sequences, [], began
    while step < settings.steps:
        turn, at = divmod(step, per_pass)
        order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(settings.seed + turn))
        for group in optimizer.param_groups:
            group["lr"] = rate(settings, step)
        ids = seen[order[at * settings.sequences : (at + 1) * settings.sequences]]
        losses.append(_step(target, model, optimizer, ids))
        step += 1
        if step % settings.checkpoint_steps and step < settings.steps:
            continue
        _keep(state, {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
        now = time.monotonic()
        speed = len(losses) * ids.numel() / (now - since)
        found = _watch(target, model, watched)
        print(
            f"step {step:5} passes {step / per_pass:.2f} trained {sum(losses) / len(losses):.4f} unseen {found} "
            f"{speed:.0f} tokens/s {(now - began) / 60:.1f} minutes",
            flush=True,
        )
        losses, since = [], time.monotonic()
        if now - began > 60 * minutes:
            break
    return step == settings.steps


def rate(settings: TrainingPart, step: int) -> float:
    """The learning rate of a step: it rises linearly, is constant, and falls linearly."""
    rising, falling = (step + 1) / settings.warmup_steps, (settings.steps - step) / settings.decay_steps
    return settings.learning_rate * min(1.0, rising, falling)


def _step(target: PreTrainedModel, model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """One step on a batch int64 [b, length]; returns the divergence before it."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = target(ids, use_cache=False).logits
        logits = model(ids, use_cache=False).logits
    loss = divergence(wanted.flatten(0, 1), logits.flatten(0, 1)).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _watch(target: PreTrainedModel, model: PreTrainedModel, rows: Tensor) -> str:
    """Divergence, and loss on the text, in nats a token; share of tokens where both have the same best token."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        wanted, logits = (made(rows, use_cache=False).logits[:, :-1].flatten(0, 1) for made in (target, model))
    loss = torch.nn.functional.cross_entropy(logits.float(), rows[:, 1:].flatten())
    same = (wanted.argmax(-1) == logits.argmax(-1)).float().mean()
    return f"{divergence(wanted, logits).mean():.4f} text {loss:.4f} top1 {same:.3f}"


def _keep(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of training, whole or not at all."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    write_bytes(path, content.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=100.0, help="stop at the first checkpoint after so many")
    given = parser.parse_args()
    recipe = check(strict_yaml.load(given.recipe), HybridRecipe, SCHEMA)
    if not make(recipe, given.folder, given.minutes):
        print("not finished: run it again to go on")


if __name__ == "__main__":
    main()
