"""An EAGLE-3 head, a block drafter or an MTP layer of a base model.

    python bench/make_module.py RECIPE FOLDER [--shared SHARED] [--minutes N] [--device DEVICE] [--all-states]

The module learns the base's next-token distributions by Kullback-Leibler divergence, on the base's own text, over
several levels at once (arXiv:2503.01840, "training-time test"): level 1 reads the base's states, each further level the
states of the level before, and attends to the rows of level 1 before its position and to its own position's rows above.
The levels of a block drafter are those of blocks at random roots of the texts (arXiv:2602.06036).

The learning rate is constant until an epoch lowers the loss on held-out texts by less than `least_gain`, and falls to 0
in one more epoch.

Writes into FOLDER the module in bfloat16 and `losses.json`: an EAGLE-3 head in the layout of SpecForge and SGLang; the
tensors of an MTP layer in `model-mtp.safetensors` with an index, for the folder of the base. Also the texts (*.jsonl)
and `training.pt`, the state of an unfinished run, which are not part of the module. An interrupted run, or one that has
used its minutes, goes on from there. With `--all-states` the weights are kept at every fiftieth step and at the end of
epochs, as `weights-STEP.pt`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from corpus import is_unseen, standard_library
from make_pocket import AnswersPart, write_openings
from make_pocket_draft import SeedsPart
from module_losses import Text, block_losses, losses
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, set_seed

from treeopt.defaults import EAGLE
from treeopt.files import strict_yaml
from treeopt.files.atomic import write_bytes, write_text
from treeopt.files.strict_yaml import Schema, check
from treeopt.models.base import Base, load_base
from treeopt.models.block_module import BlockModule, BlockWiring
from treeopt.models.draft_layouts import mtp_layout
from treeopt.models.draft_module import OWN, DraftModule, StateModule, Wiring
from treeopt.texts.prompts import load_prompts
from treeopt.train.data import load_texts
from treeopt.train.distill import SelfTalk, distill

SCHEMA = "treeopt.module-recipe/1"
# Names of an MTP layer's tensors in Qwen's layout, but those of its decoder layer -> in the module.
MTP_NAMES = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "state_norm.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "decoder.layers.0.",
}
KEPT = (  # keys of a config that are written
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "rope_parameters", "num_hidden_layers", "vocab_size"),
)
AT_ONCE = 8  # texts of a forward of the base
WINDOW = 16  # steps whose texts are ordered by length
UNSEEN_ONE_IN = 10  # modules of the corpus that are kept for judging, as for pocket


class EaglePart(Schema):
    """The sizes of an EAGLE-3 head; all others are the base's. `reads` are hidden states of the base, as `HS[i]`.

    `draft_vocabulary` is the number of the texts' most frequent tokens that it drafts; None for all.
    """

    reads: list[int]
    intermediate_size: int
    draft_vocabulary: int | None = None


class BlockPart(Schema):
    """The sizes of a block drafter; all others are the base's. `size` counts the root, `mask` is a token.

    With a `markov_rank` it is DSpark, whose root's row predicts and which has a confidence head, else DFlash.
    """

    reads: list[int]
    layers: int
    intermediate_size: int
    size: int
    mask: int
    anchors: int  # blocks of a text in a step
    markov_rank: int = 0

    @property
    def levels(self) -> int:
        return self.size if self.markov_rank else self.size - 1


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
    """The format `treeopt.module-recipe/1`; its texts begin with openings of a corpus, answer the first `questions`
    prompts of AlpacaEval, and are the base's own talk, `self_talk` texts of each of so many seeds.

    Without `eagle` or `block` an MTP layer is made, of the base's own decoder layer.
    """

    schema_name: Literal["treeopt.module-recipe/1"] = Field(alias="schema")
    base: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    openings: SeedsPart | None = None
    questions: int | None = None
    self_talk: int | None = None
    self_talk_seeds: int = 1
    answers: AnswersPart
    eagle: EaglePart | None = None
    block: BlockPart | None = None
    training: TrainingPart


class State:
    """A training in progress: the module, the base's rows of the LM head of the tokens that it drafts [V_draft, d], its
    optimizer, and the losses of each epoch on held-out texts.
    """

    def __init__(
        self, module: DraftModule | BlockModule, lm_head: Tensor, settings: TrainingPart, anchors: int
    ) -> None:
        self.module, self.lm_head, self.settings, self.anchors = module, lm_head, settings, anchors
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
        kept = torch.load(path, map_location=self.lm_head.device, weights_only=True)
        self.module.load_state_dict(kept["module"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.losses, self.last_epoch = kept["step"], kept["losses"], kept["last_epoch"]

    def rate(self, steps: int) -> float:
        """The learning rate of a step, with so many steps an epoch; it falls to 0 in the last epoch."""
        rising = (self.step + 1) / self.settings.warmup_steps
        falling = ((self.last_epoch + 1) * steps - self.step) / steps
        return self.settings.learning_rate * min(1.0, rising, falling)


def make(
    recipe: ModuleRecipe,
    folder: Path,
    shared: Path,
    minutes: float = 100.0,
    device: str = "cpu",
    *,
    all_states: bool = False,
) -> bool:
    """Train the head and write its files into a folder; finished steps are skipped.

    Returns:
        False where the minutes were used before the last step: call again to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.block is not None and recipe.training.levels != recipe.block.levels:
        sys.exit(f"training.levels is {recipe.training.levels}, and the block drafts {recipe.block.levels}")
    if (folder / "losses.json").exists():
        return True
    local = shared / "models" / recipe.base
    base = load_base(str(local if local.exists() else recipe.base), dtype=recipe.dtype, device=device)
    texts = own_texts(recipe, base, folder, shared)
    module = new_module(recipe, base, texts).to(base.device)
    read = with_states(texts, base, module)
    held_out, seen = read[: recipe.training.held_out], read[recipe.training.held_out :]
    anchors = recipe.block.anchors if recipe.block is not None else 0
    state = State(module, base.lm_head.weight.detach()[drafted(module)], recipe.training, anchors)
    if (folder / "training.pt").exists():
        state.load(folder / "training.pt")
    if not train(state, seen, held_out, folder, minutes, all_states=all_states):
        return False
    save(state.module.cpu(), recipe, base, folder)
    names = [f"level {level}" for level in range(1, recipe.training.levels + 1)]
    figures = {"parameters": state.module.num_parameters(), "epochs": len(state.losses), "held_out": names}
    write_text(folder / "losses.json", json.dumps({**figures, "losses": state.losses}) + "\n")
    return True


def own_texts(recipe: ModuleRecipe, base: Base, folder: Path, shared: Path) -> list[Tensor]:
    """The base's text as token ids int64 [T], in a random order."""
    seed, runs = recipe.training.seed, dict[str, Any]()
    if recipe.openings is not None:
        seeds = folder / "seeds.jsonl"
        seen = [d for d in standard_library() if not is_unseen(d, UNSEEN_ONE_IN)]
        write_openings(seeds, seen, recipe.openings.characters, recipe.openings.seeds, seed)
        runs["openings"] = (load_prompts(str(seeds)), 0)
    if recipe.questions is not None:
        questions = shared / "data" / "alpaca_eval.json"
        runs["questions"] = (load_prompts(str(questions), limit=recipe.questions), 0)
    for number in range(recipe.self_talk_seeds if recipe.self_talk else 0):
        runs[f"self-talk-{number}"] = (SelfTalk(recipe.self_talk or 0), number)
    files = [folder / f"{name}.jsonl" for name in runs]
    for answers, (prompts, of_run) in zip(files, runs.values(), strict=True):
        if not answers.exists():
            resume = answers.with_name(f"{answers.name}.partial").exists()
            distill(base, prompts, answers, resume=resume, seed=of_run, **recipe.answers.model_dump())
    examples = load_texts(base, [str(path) for path in files], length=recipe.training.length).examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [torch.from_numpy(examples[index].ids).long() for index in order]


@torch.inference_mode()
def with_states(texts: Sequence[Tensor], base: Base, module: StateModule) -> list[Text]:
    """Texts with the base's states and probabilities, on its device: they are computed once, for all epochs."""
    reading, found = base.reading((*module.wiring.reads, base.layers)), dict[int, Text]()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        ids = torch.nn.utils.rnn.pad_sequence([texts[number] for number in part], batch_first=True).to(base.device)
        logits, states = reading.forward(ids, use_cache=False)  # padding is on the right, where no token attends to it
        for row, number in enumerate(part):
            length = len(texts[number])
            read, last = states[row, :length, : -base.hidden_size], states[row, :length, -base.hidden_size :]
            inside = logits[row, :length].float().softmax(-1)[:, drafted(module)].sum(-1)
            found[number] = Text(ids[row, :length].clone(), read.clone(), last.clone(), inside)
    return [found[number] for number in range(len(texts))]


def drafted(module: StateModule) -> Tensor | slice:
    """The tokens that a module drafts, as an index."""
    return slice(None) if module.token_map is None else module.token_map


def new_module(recipe: ModuleRecipe, base: Base, texts: Sequence[Tensor]) -> DraftModule | BlockModule:
    """A module of random weights, a head with the base's LM head; this seeds all random generators."""
    set_seed(recipe.training.seed)
    of_base, eagle, shared = base.model.config, recipe.eagle, (base.model.get_input_embeddings(), base.lm_head)
    if recipe.block is not None:
        return new_block(recipe.block, base)
    if eagle is None:
        layout = mtp_layout({"fc.weight": "mtp.fc.weight"}, of_base, base.hidden_size)
        return DraftModule(layout.config, layout.wiring, *shared, base.vocab_size)
    config = LlamaConfig(intermediate_size=eagle.intermediate_size, num_hidden_layers=1, **sizes_of(base))
    wiring = Wiring(
        EAGLE,
        "EAGLE-3",
        tuple(eagle.reads),
        base.hidden_size,
        wide=True,
        project=True,
        vocabulary=eagle.draft_vocabulary or base.vocab_size,
    )
    module = DraftModule(config, wiring, *shared, base.vocab_size)
    counts = torch.bincount(torch.cat(list(texts)), minlength=base.vocab_size)
    module.tokens.copy_(counts.argsort(descending=True, stable=True)[: wiring.vocabulary].sort().values)
    module.lm_head.weight.data.copy_(base.lm_head.weight[module.tokens])
    return module


def sizes_of(base: Base) -> dict[str, Any]:
    """The sizes of a base that its modules share."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    more = ("rms_norm_eps", "rope_parameters", "vocab_size")
    return {name: getattr(base.model.config, name) for name in (*names, *more)} | {"attn_implementation": "sdpa"}


def new_block(block: BlockPart, base: Base) -> BlockModule:
    """A block drafter of random weights, with the base's embeddings and LM head."""
    config = Qwen3Config(intermediate_size=block.intermediate_size, num_hidden_layers=block.layers, **sizes_of(base))
    sizes = tuple(block.reads), base.hidden_size, block.size, block.mask
    wiring = BlockWiring("DFlash", *sizes)
    if block.markov_rank:
        head: Any = {"from_root": True, "confidence": True, "confidence_of_token": True}
        wiring = dataclasses.replace(wiring, markov_rank=block.markov_rank, **head)
    return BlockModule(config, wiring, base.model.get_input_embeddings(), base.lm_head, base.vocab_size)


def losses_of(state: State, texts: Sequence[Text], seed: int) -> Tensor:
    """The losses of each level on texts."""
    if isinstance(state.module, BlockModule):
        return block_losses(state.module, state.lm_head, texts, state.anchors, seed)
    return losses(state.module, state.lm_head, texts, state.settings.levels)


def train(
    state: State,
    seen: Sequence[Text],
    held_out: Sequence[Text],
    folder: Path,
    minutes: float,
    *,
    all_states: bool = False,
) -> bool:
    """Train by whole epochs; True after the last. A line is printed for each with the losses on held-out texts."""
    settings, began = state.settings, time.monotonic()
    steps = len(seen) // settings.texts
    device = state.lm_head.device
    weights = torch.tensor([settings.level_decay**level for level in range(settings.levels)], device=device)
    while state.step < (state.last_epoch + 1) * steps:
        epoch, at = divmod(state.step, steps)
        order = batches_of(seen, settings.texts, settings.seed + epoch)
        for group in state.optimizer.param_groups:
            group["lr"] = state.rate(steps)
        texts = [seen[index] for index in order[at]]
        with torch.autocast(device.type, torch.bfloat16):
            loss = (losses_of(state, texts, settings.seed + state.step) * weights).sum() / weights.sum()
        state.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.nn.utils.clip_grad_norm_(state.module.parameters(), 1.0)
        state.optimizer.step()
        state.step += 1
        if state.step % steps == 0:
            state.losses.append(judged(state, held_out))
            if epoch < state.last_epoch and len(state.losses) > 1:
                before, now = (math.fsum(one) for one in state.losses[-2:])
                if now > before * (1 - settings.least_gain):
                    state.last_epoch = epoch + 1
            shown = " ".join(f"{one:.4f}" for one in state.losses[-1])
            print(f"epoch {epoch + 1} held out {shown} {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        if state.step % steps == 0 or state.step % 50 == 0:
            state.keep(folder / "training.pt")
            if all_states:
                torch.save({"module": state.module.state_dict()}, folder / f"weights-{state.step:05}.pt")
            if time.monotonic() - began > 60 * minutes:
                break
    return state.step == (state.last_epoch + 1) * steps


def batches_of(texts: Sequence[Text], size: int, seed: int) -> list[list[int]]:
    """The texts of each step of an epoch, in a random order: of similar lengths, so that little is padding."""
    chance = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=chance).tolist()[: len(texts) // size * size]
    parts = [order[at : at + WINDOW * size] for at in range(0, len(order), WINDOW * size)]
    sorted_ = [index for part in parts for index in sorted(part, key=lambda one: len(texts[one].ids))]
    batches = [sorted_[at : at + size] for at in range(0, len(sorted_), size)]
    return [batches[number] for number in torch.randperm(len(batches), generator=chance).tolist()]


@torch.inference_mode()
def judged(state: State, texts: Sequence[Text]) -> list[float]:
    """The divergence of each level on texts."""
    size = state.settings.texts
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    with torch.autocast(state.lm_head.device.type, torch.bfloat16):
        found = torch.stack([losses_of(state, part, number) for number, part in enumerate(parts)])
    return [round(one, 5) for one in found.mean(0).tolist()]


def save(module: DraftModule | BlockModule, recipe: ModuleRecipe, base: Base, folder: Path) -> None:
    """Write a head in SpecForge's layout, a block drafter in z-lab's, or an MTP layer in Qwen's."""
    if isinstance(module, BlockModule):
        save_block(module, recipe, base, folder)
        return
    if recipe.eagle is None:
        save_mtp(module, base, folder)
        return
    state = {key.replace("decoder.layers.0.", "midlayer."): one for key, one in module.state_dict().items()}
    tokens = state.pop("tokens")
    count, inside = len(tokens), torch.zeros(module.base_vocab_size, dtype=torch.bool)
    inside[tokens] = True
    del state["wired"]
    tensors = {key: one.to(torch.bfloat16).contiguous() for key, one in state.items()}
    tensors |= {"d2t": tokens - torch.arange(count), "t2d": inside}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": count,
        **{key: value for key, value in module.config.to_dict().items() if key in KEPT},
        # Numbers of layers, whose outputs are read: one less than the number of the state.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in recipe.eagle.reads]},
        "dtype": "bfloat16",
        "base": {"name": recipe.base, "fingerprint": base.fingerprint},
    }
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def save_block(module: BlockModule, recipe: ModuleRecipe, base: Base, folder: Path) -> None:
    """Write DFlash in z-lab's layout, DSpark in DeepSpec's."""
    state = {key.removeprefix("decoder."): one for key, one in module.state_dict().items() if key not in OWN}
    tensors = {key: one.to(torch.bfloat16).contiguous() for key, one in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layers, wiring = [one - 1 for one in module.wiring.reads], module.wiring  # layers whose outputs are read
    settings: dict[str, Any] = {"mask_token_id": wiring.mask, "target_layer_ids": layers}
    if wiring.markov_rank:
        kind = {"markov_rank": wiring.markov_rank, "markov_head_type": wiring.markov}
        settings |= {**kind, "enable_confidence_head": True, "confidence_head_with_markov": True}
    config = {
        "architectures": ["Qwen3DSparkModel" if wiring.markov_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": wiring.size,
        **(settings if wiring.markov_rank else {"dflash_config": settings}),
        **{key: value for key, value in module.config.to_dict().items() if key in KEPT},
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
    parser.add_argument(
        "--all-states", action="store_true", help="keep the weights at every fiftieth step and at the end of epochs"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    given = parser.parse_args()
    recipe = check(strict_yaml.load(given.recipe), ModuleRecipe, SCHEMA)
    if not make(recipe, given.folder, given.shared, given.minutes, given.device, all_states=given.all_states):
        print("not finished: run it again to go on")


if __name__ == "__main__":
    main()
