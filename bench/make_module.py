"""An EAGLE-3 head or an MTP layer of a base model.

    python bench/make_module.py RECIPE FOLDER [--shared SHARED] [--minutes N]

The module learns the base's next-token distributions by Kullback-Leibler divergence, on the base's own text, over
several levels at once (arXiv:2503.01840, "training-time test"): level 1 reads the base's states, each further level the
states of the level before, and attends to the rows of level 1 before its position and to its own position's rows above.
The learning rate is constant until an epoch lowers the loss on held-out texts by less than `least_gain`, and falls to 0
in one more epoch.

Writes into FOLDER the module in bfloat16 and `losses.json`: an EAGLE-3 head in the layout of SpecForge and SGLang; the
tensors of an MTP layer in `model-mtp.safetensors` with an index, for the folder of the base. Also `answers.jsonl`, the
text, and `training.pt`, the state of an unfinished run, which are not part of the module. An interrupted run, or one
that has used its minutes, goes on from there.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from corpus import is_unseen, standard_library
from make_pocket import AnswersPart, write_openings
from make_pocket_draft import SeedsPart, divergence
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, set_seed

from treeopt.defaults import EAGLE
from treeopt.files import strict_yaml
from treeopt.files.atomic import write_bytes, write_text
from treeopt.files.strict_yaml import Schema, check
from treeopt.models.base import Base, load_base
from treeopt.models.draft_layouts import mtp_layout
from treeopt.models.draft_module import OWN, DraftModule, Wiring
from treeopt.texts.prompts import load_prompts
from treeopt.train.data import load_texts
from treeopt.train.distill import distill
from treeopt.train.talks import SelfTalk

SCHEMA = "treeopt.module-recipe/1"
# Names of an MTP layer's tensors in Qwen's layout, but those of its decoder layer -> in the module.
MTP_NAMES = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "state_norm.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "decoder.layers.0.",
}
UNSEEN_ONE_IN = 10  # modules of the corpus that are kept for judging, as for pocket


class EaglePart(Schema):
    """The sizes of an EAGLE-3 head; all others are the base's. `reads` are hidden states of the base, as `HS[i]`."""

    reads: list[int]
    intermediate_size: int


class TrainingPart(Schema):
    """How it is trained."""

    levels: int
    level_decay: float
    length: int
    texts: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    held_out: int
    least_gain: float
    most_epochs: int
    seed: int


class ModuleRecipe(Schema):
    """The format `treeopt.module-recipe/1`; its texts begin with openings of a corpus, or are the base's own talk.

    Without `eagle` an MTP layer is made, of the base's own decoder layer.
    """

    schema_name: Literal["treeopt.module-recipe/1"] = Field(alias="schema")
    base: str
    openings: SeedsPart | None = None
    self_talk: int | None = None
    answers: AnswersPart
    eagle: EaglePart | None = None
    training: TrainingPart


class State:
    """A training in progress: the module, its optimizer, and the losses of each epoch on held-out texts."""

    def __init__(self, module: DraftModule, settings: TrainingPart) -> None:
        self.module, self.settings = module, settings
        wide = [[p for p in module.parameters() if (p.dim() > 1) is side] for side in (True, False)]
        decays = (settings.weight_decay, 0.0)
        groups = [{"params": part, "weight_decay": decay} for part, decay in zip(wide, decays, strict=True)]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
        self.step, self.losses, self.last_epoch = 0, list[list[float]](), settings.most_epochs - 1

    def keep(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        content = io.BytesIO()
        parts = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**parts, "step": self.step, "losses": self.losses, "last_epoch": self.last_epoch}, content)
        write_bytes(path, content.getvalue())

    def load(self, path: Path) -> None:
        """Go on from a state."""
        kept = torch.load(path, weights_only=True)
        self.module.load_state_dict(kept["module"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.losses, self.last_epoch = kept["step"], kept["losses"], kept["last_epoch"]

    def rate(self, steps: int) -> float:
        """The learning rate of a step, with so many steps an epoch; it falls to 0 in the last epoch."""
        rising = (self.step + 1) / self.settings.warmup_steps
        falling = ((self.last_epoch + 1) * steps - self.step) / steps
        return self.settings.learning_rate * min(1.0, rising, falling)


def make(recipe: ModuleRecipe, folder: Path, shared: Path, minutes: float = 100.0) -> bool:
    """Train the head and write its files into a folder; finished steps are skipped.

    Returns:
        False where the minutes were used before the last step: call again to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "losses.json").exists():
        return True
    local = shared / "models" / recipe.base
    base = load_base(str(local if local.exists() else recipe.base), dtype="float32", device="cpu")
    texts = own_texts(recipe, base, folder)
    held_out, seen = texts[: recipe.training.held_out], texts[recipe.training.held_out :]
    state = State(new_module(recipe, base), recipe.training)
    base = base.reading(state.module.wiring.reads)
    if (folder / "training.pt").exists():
        state.load(folder / "training.pt")
    if not train(state, base, seen, held_out, folder, minutes):
        return False
    save(state.module, recipe, base, folder)
    names = [f"level {level}" for level in range(1, recipe.training.levels + 1)]
    figures = {"parameters": state.module.num_parameters(), "epochs": len(state.losses), "held_out": names}
    write_text(folder / "losses.json", json.dumps({**figures, "losses": state.losses}) + "\n")
    return True


def own_texts(recipe: ModuleRecipe, base: Base, folder: Path) -> list[Tensor]:
    """The base's text as token ids int64 [T], in a random order."""
    answers = folder / "answers.jsonl"
    if not answers.exists():
        prompts: Any = None
        if recipe.openings is not None:
            seeds, seed = folder / "seeds.jsonl", recipe.training.seed
            seen = [d for d in standard_library() if not is_unseen(d, UNSEEN_ONE_IN)]
            write_openings(seeds, seen, recipe.openings.characters, recipe.openings.seeds, seed)
            prompts = load_prompts(str(seeds))
        else:
            prompts = SelfTalk(recipe.self_talk or 0)
        resume = answers.with_name("answers.jsonl.partial").exists()
        distill(base, prompts, answers, resume=resume, **recipe.answers.model_dump())
    examples = load_texts(base, [str(answers)], length=recipe.training.length).examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(recipe.training.seed)).tolist()
    return [torch.from_numpy(examples[index].ids).long() for index in order]


def new_module(recipe: ModuleRecipe, base: Base) -> DraftModule:
    """A module of random weights, a head with the base's LM head; this seeds all random generators."""
    set_seed(recipe.training.seed)
    of_base, eagle, shared = base.model.config, recipe.eagle, (base.model.get_input_embeddings(), base.lm_head)
    if eagle is None:
        layout = mtp_layout({"fc.weight"}, of_base, base.hidden_size)
        return DraftModule(layout.config, layout.wiring, *shared, base.vocab_size)
    config = LlamaConfig(
        hidden_size=of_base.hidden_size,
        intermediate_size=eagle.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=of_base.num_attention_heads,
        num_key_value_heads=of_base.num_key_value_heads,
        head_dim=of_base.head_dim,
        max_position_embeddings=of_base.max_position_embeddings,
        rms_norm_eps=of_base.rms_norm_eps,
        rope_parameters=of_base.rope_parameters,
        vocab_size=of_base.vocab_size,
        attn_implementation="sdpa",
    )
    wiring = Wiring(
        EAGLE,
        "EAGLE-3",
        tuple(eagle.reads),
        base.hidden_size,
        wide=True,
        project=True,
        vocabulary=base.vocab_size,
    )
    module = DraftModule(config, wiring, *shared, base.vocab_size)
    module.lm_head.weight.data.copy_(base.lm_head.weight)
    return module


def losses(module: DraftModule, base: Base, texts: Sequence[Tensor], levels: int) -> Tensor:
    """float [levels]: the mean divergence of each level from the base's distribution of the token that it drafts.

    The row of position i, at level d, reads token i + d and predicts token i + d + 1.
    """
    ids = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    ends = torch.tensor([len(text) for text in texts])
    with torch.no_grad():
        wanted, read = base.forward(ids, use_cache=False)
    rows = ids.shape[1] - levels
    places, cache = torch.arange(rows), DynamicCache()
    causal = places[:, None] >= places
    hidden, found = module.states(read[:, :rows]), []
    own = torch.eye(rows, dtype=torch.bool)
    for level in range(1, levels + 1):
        mask = torch.cat([causal, *[own] * (level - 1)], dim=1)
        scores = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        out = module(
            ids[:, level : level + rows],
            hidden,
            attention_mask=scores.expand(len(ids), -1, -1, -1),
            position_ids=(places + level - 1)[None],
            past_key_values=cache,
            use_cache=True,
        )
        [hidden] = out.hidden_states
        inside = places[None] + level < ends[:, None] - 1
        found.append(divergence(wanted[:, level : level + rows][inside], out.logits[inside]).mean())
    return torch.stack(found)


def train(
    state: State, base: Base, seen: Sequence[Tensor], held_out: Sequence[Tensor], folder: Path, minutes: float
) -> bool:
    """Train by whole epochs; True after the last. A line is printed for each with the losses on held-out texts."""
    settings, began = state.settings, time.monotonic()
    steps = len(seen) // settings.texts
    weights = torch.tensor([settings.level_decay**level for level in range(settings.levels)])
    while state.step < (state.last_epoch + 1) * steps:
        epoch, at = divmod(state.step, steps)
        order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(settings.seed + epoch)).tolist()
        for group in state.optimizer.param_groups:
            group["lr"] = state.rate(steps)
        texts = [seen[index] for index in order[at * settings.texts : (at + 1) * settings.texts]]
        with torch.autocast("cpu", torch.bfloat16):
            loss = (losses(state.module, base, texts, settings.levels) * weights).sum() / weights.sum()
        state.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.nn.utils.clip_grad_norm_(state.module.parameters(), 1.0)
        state.optimizer.step()
        state.step += 1
        if state.step % steps == 0:
            state.losses.append(judged(state.module, base, held_out, settings))
            if epoch < state.last_epoch and len(state.losses) > 1:
                before, now = (math.fsum(one) for one in state.losses[-2:])
                if now > before * (1 - settings.least_gain):
                    state.last_epoch = epoch + 1
            shown = " ".join(f"{one:.4f}" for one in state.losses[-1])
            print(f"epoch {epoch + 1} held out {shown} {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        if state.step % steps == 0 or state.step % 50 == 0:
            state.keep(folder / "training.pt")
            if time.monotonic() - began > 60 * minutes:
                break
    return state.step == (state.last_epoch + 1) * steps


@torch.inference_mode()
def judged(module: DraftModule, base: Base, texts: Sequence[Tensor], settings: TrainingPart) -> list[float]:
    """The divergence of each level on texts."""
    parts = [texts[start : start + settings.texts] for start in range(0, len(texts), settings.texts)]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([losses(module, base, part, settings.levels) for part in parts])
    return [round(one, 5) for one in found.mean(0).tolist()]


def save(module: DraftModule, recipe: ModuleRecipe, base: Base, folder: Path) -> None:
    """Write a head in SpecForge's layout, or an MTP layer in Qwen's."""
    if recipe.eagle is None:
        save_mtp(module, base, folder)
        return
    state = {key.replace("decoder.layers.0.", "midlayer."): one for key, one in module.state_dict().items()}
    count = len(state.pop("tokens"))
    del state["wired"]
    tensors = {key: one.to(torch.bfloat16).contiguous() for key, one in state.items()}
    tensors |= {"d2t": torch.zeros(count, dtype=torch.long), "t2d": torch.ones(count, dtype=torch.bool)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = [
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
        *("max_position_embeddings", "rms_norm_eps", "rope_parameters", "num_hidden_layers", "vocab_size"),
    ]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": count,
        **{key: value for key, value in module.config.to_dict().items() if key in kept},
        # Numbers of layers, whose outputs are read: one less than the number of the state.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in recipe.eagle.reads]},
        "dtype": "bfloat16",
        "base": {"name": recipe.base, "fingerprint": base.fingerprint},
    }
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def save_mtp(module: DraftModule, base: Base, folder: Path) -> None:
    """Write the tensors of an MTP layer, and an index of them and of the base's own in `model.safetensors`."""
    tensors = {}
    for key, one in module.state_dict().items():
        if key in OWN:
            continue
        name, part = next((name, part) for name, part in MTP_NAMES.items() if key.startswith(part))
        tensors[name + key.removeprefix(part)] = one.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    with safe_open(Path(base.name) / "model.safetensors", framework="pt") as opened:
        places = dict.fromkeys(opened.keys(), "model.safetensors")
    places |= dict.fromkeys(tensors, "model-mtp.safetensors")
    index = {"metadata": {}, "weight_map": places}
    write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--minutes", type=float, default=100.0, help="stop after so many")
    given = parser.parse_args()
    recipe = check(strict_yaml.load(given.recipe), ModuleRecipe, SCHEMA)
    if not make(recipe, given.folder, given.shared, given.minutes):
        print("not finished: run it again to go on")


if __name__ == "__main__":
    main()
