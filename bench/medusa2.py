"""Medusa-1 and Medusa-2 side by side, as in table 2 of arXiv:2401.10774: tokens per step, and what the base loses.

    python bench/medusa2.py --model tinystories|pocket [--steps 100] [--temperature 0] [--folder runs]

All runs learn from the same texts, the base's answers: self-talk of tinystories, and answers to openings from the
modules that pocket was trained on. Rows, each with the same number of steps in all but the first:

    Medusa-1               heads alone, the first stage: `--steps` steps
    Medusa-1, both stages  heads alone, twice as many steps
    Medusa-2, two stages   from the heads of the first row, with lambda_0 = 0.2: L_LM is the cross-entropy of the texts
    Medusa-2, distilled    the same with L_LM = KL(p_original || p)
    direct joint tuning    new heads, twice as many steps, lambda_0 = 1 and one learning rate: the paper's warning

Tokens per step are of static trees with 16 and 64 nodes. A tree is built from the first half of the prompts and
replayed over the second, on greedy text of the row's base; the drafter heads+ngram is cross-validated. Losses are in
nats a token: on training texts held out, and on `--temperature 1` text that the original base samples after the prompts
(tinystories) or on source text of modules that it was not trained on (pocket). The divergence is KL(original || row).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from corpus import Document, is_unseen, standard_library
from make_pocket import write_openings
from timing import add_tiny, judged, machine
from torch import Tensor
from torch.nn import functional as F

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibration import Calibration
from treeopt.drafting.learn import Learning
from treeopt.models.base import Base, load_base
from treeopt.models.head_files import WEIGHT_FILES, load_heads
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import PromptSet, load_prompts
from treeopt.train.data import TrainingTexts, collate, load_texts
from treeopt.train.distill import SelfTalk, distill
from treeopt.train.loss import IGNORED, next_tokens
from treeopt.train.medusa1 import train_heads
from treeopt.train.medusa2 import train_jointly
from treeopt.train.settings import CONSTANT, JointSettings, Settings

NODES = (16, 64)
TOP_K = 32
UNSEEN_ONE_IN, CHARACTERS = 10, 320  # calibration/recipes/pocket.yaml
LOSS_KEPT = 1.02  # the base's held-out loss after two-stage Medusa-2, over that before
Rows = Sequence[tuple[Tensor, Tensor]]  # ids [1, T] and true next tokens [1, T]


@dataclass(frozen=True)
class Setting:
    """A base model with what is trained and measured on it."""

    base: Base
    heads: Settings
    joint_rate: float
    prompts: PromptSet
    texts: TrainingTexts
    held_out: Rows
    other: Rows
    folder: Path
    options: argparse.Namespace


def made_texts(base: Base, options: argparse.Namespace, folder: Path) -> TrainingTexts:
    """The base's answers, written to a file of the folder where it is not there yet."""
    file = folder / f"answers-{options.temperature:g}.jsonl"
    if not file.exists():
        seeds: PromptSet | SelfTalk = SelfTalk(options.texts)
        exclude = None
        if options.model == "pocket":
            write_openings(folder / "seeds.jsonl", documents(seen=True), CHARACTERS, options.texts, 0)
            seeds = load_prompts(str(folder / "seeds.jsonl"))
        else:
            exclude = load_prompts(str(options.shared / "data" / "story_openings.json"))
        begun = file.with_name(file.name + ".partial").exists()
        distill(
            base,
            seeds,
            file,
            exclude=exclude,
            max_new_tokens=options.new_tokens,
            batch_size=64,
            temperature=options.temperature,
            resume=begun,
        )
    return load_texts(base, [str(file)], length=base.context)


def documents(*, seen: bool) -> list[Document]:
    """Modules that pocket was trained on, or those that it was not."""
    return [one for one in standard_library() if is_unseen(one, UNSEEN_ONE_IN) != seen]


def other_texts(base: Base, prompts: PromptSet, options: argparse.Namespace) -> Rows:
    """Texts that are not like the training texts: source text of unseen modules, or text sampled at temperature 1."""
    if options.model == "pocket":
        assert base.tokenizer is not None
        length = min(256, base.context)
        found = [base.tokenizer(one.text, verbose=False).input_ids[:length] for one in documents(seen=False)]
        whole = [torch.tensor(ids)[None] for ids in found if len(ids) == length][: options.others]
        return [(ids, F.pad(ids[:, 1:], (0, 1), value=IGNORED)) for ids in whole]
    half = dataclasses.replace(prompts, prompts=prompts.prompts[-options.others :])
    encoded = encode_prompts(base, half, options.new_tokens).texts
    answering = AnswerOptions(max_new_tokens=options.new_tokens, batch_size=64, temperature=1.0, seed=1)
    texts, _ = answer_all(base, encoded, answering)
    rows = []
    for text in texts:
        ids = torch.tensor([text.prompt + text.answer])
        rows.append((ids, next_tokens(ids, (torch.arange(ids.shape[1]) >= len(text.prompt)).long()[None])))
    return rows


@torch.inference_mode()
def losses(base: Base, original: Base, rows: Rows) -> tuple[float, float]:
    """Mean cross-entropy of a base, and mean KL(original || base), over the tokens of texts."""
    loss = divergence = tokens = 0.0
    for ids, true in rows:
        known = true[0] != IGNORED
        p, q = (one.model(ids.to(one.device)).logits[0][known].log_softmax(-1) for one in (base, original))
        loss += F.nll_loss(p, true[0][known], reduction="sum").item()
        divergence += (q.exp() * (q - p)).sum().item()
        tokens += int(known.sum())
    return loss / tokens, divergence / tokens


def taus(setting: Setting, base: Base, heads: Path, learning: Learning | None) -> list[float]:
    """Tokens per step at each number of nodes, of trees built from the first half of the prompts, on the second."""
    run = run_calibration(
        base,
        load_heads(heads),
        setting.prompts,
        max_new_tokens=setting.options.new_tokens,
        batch_size=64,
        learning=learning,
    )
    traced: Calibration = run.calibration
    half = traced.sequences // 2
    fitted = traced.select(list(range(half)))
    hashes = set(fitted.token_hashes)
    later = [text for text in range(half, traced.sequences) if traced.token_hashes[text] not in hashes]
    evaluated = traced.select(later)
    return [replay(build_tree(fitted, nodes, top_k=TOP_K), evaluated).tokens_per_step for nodes in NODES]


def runs(setting: Setting) -> dict[str, Callable[[], Path]]:
    """Name of each row, and a function that trains it and returns the folder of its heads."""
    options, folder = setting.options, setting.folder
    steps, both = options.steps, 2 * options.steps
    shape = {name: getattr(setting.heads, name) for name in ("num_heads", "blocks", "shared_lm_head", "batch_size")}
    joint = JointSettings(steps=steps, learning_rate=setting.joint_rate, **shape)
    direct = dataclasses.replace(joint, steps=both, heads_schedule=CONSTANT, heads_weight=1.0, heads_rate=1.0)

    def first(name: str, count: int) -> Path:
        if not (folder / name / WEIGHT_FILES[0]).exists():
            train_heads(setting.base, setting.texts, folder / name, dataclasses.replace(setting.heads, steps=count))
        return folder / name

    def second(name: str, settings: JointSettings, heads: Path | None) -> Path:
        if not (folder / name / WEIGHT_FILES[0]).exists():
            train_jointly(setting.base, setting.texts, folder / name, settings, heads=heads)
        return folder / name

    one = folder / "medusa1"
    return {
        "Medusa-1": lambda: first("medusa1", steps),
        "Medusa-1, both stages": lambda: first("medusa1-both", both),
        "Medusa-2, two stages": lambda: second("two-stage", joint, one),
        "Medusa-2, distilled": lambda: second("distilled", dataclasses.replace(joint, self_distill=True), one),
        "direct joint tuning": lambda: second("direct", direct, None),
    }


def measure(setting: Setting, original: Base, heads: Path) -> dict[str, list[float]]:
    """The figures of a row."""
    adapter = heads / "adapter"
    base = load_base(setting.base.name, dtype="float32", device="cpu", adapter=adapter if adapter.exists() else None)
    plain = taus(setting, base, heads, None)
    learning = Learning(tokens=setting.options.learn_tokens)
    return {
        "heads": plain,
        "heads+ngram": taus(setting, base, heads, learning) if learning.tokens else plain,
        "answers": list(losses(base, original, setting.held_out)),
        "other text": list(losses(base, original, setting.other)),
    }


def setting_of(options: argparse.Namespace, folder: Path) -> Setting:
    """Base, texts and settings of a model."""
    if options.model == "pocket":
        name, prompts = "pocket", load_prompts("pocket", limit=options.prompts)
        heads, rate = Settings(learning_rate=0.01, blocks=2, shared_lm_head=True, batch_size=options.batch), 0.001
    else:
        name = str(options.shared / "models" / "tinystories-260k")
        prompts = load_prompts(str(options.shared / "data" / "story_openings.json"), limit=options.prompts)
        heads, rate = Settings(learning_rate=0.03, batch_size=options.batch), 0.002
    base = load_base(name, dtype="float32", device="cpu")
    texts = made_texts(base, options, folder)
    kept = texts.examples[: -options.held_out]
    rows = []
    for example in texts.examples[-options.held_out :]:
        batch = collate([example])
        rows.append((batch["ids"], next_tokens(**batch)))
    trained = dataclasses.replace(texts, examples=kept)
    other = other_texts(base, prompts, options)
    return Setting(base, heads, options.joint_rate or rate, prompts, trained, rows, other, folder, options)


def table(setting: Setting) -> None:
    """Train, measure and print each row."""
    tokens = sum(len(example.ids) for example in setting.texts.examples)
    count, steps = len(setting.texts.examples), setting.options.steps
    print(f"{setting.base.name}: {count} texts, {tokens:,} tokens; {steps} steps a stage")
    before = {"answers": losses(setting.base, setting.base, setting.held_out)[0]}
    before["other text"] = losses(setting.base, setting.base, setting.other)[0]
    print(f"the base's loss: {before['answers']:.4f} on answers held out, {before['other text']:.4f} on other text")
    columns = [f"{drafter} {nodes}" for drafter in ("heads", "heads+ngram") for nodes in NODES]
    print("\t".join(["", *columns, "loss", "KL", "loss, other text", "KL, other text"]), flush=True)
    found = {}
    for name, train in runs(setting).items():
        row = found[name] = measure(setting, setting.base, train())
        cells = [f"{tau:.3f}" for tau in (*row["heads"], *row["heads+ngram"])]
        cells += [f"{value:.4f}" for value in (*row["answers"], *row["other text"])]
        print("\t".join([name, *cells]), flush=True)
    for text, loss in before.items():
        judged(f"two stages, loss on {text}", found["Medusa-2, two stages"][text][0] / loss, LOSS_KEPT, most=True)
    for name in ("Medusa-2, two stages", "Medusa-2, distilled"):
        for one, nodes in enumerate(NODES):
            best = max(found[first]["heads"][one] for first in ("Medusa-1", "Medusa-1, both stages"))
            judged(f"{name}, heads, {nodes} nodes, over Medusa-1", found[name]["heads"][one] / best, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tinystories", "pocket"), default="tinystories")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--steps", type=int, default=100, help="of each stage")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the training texts")
    parser.add_argument("--joint-rate", type=float, help="learning rate of the adapter")
    parser.add_argument(
        "--folder", type=Path, help="for a folder of each model with its texts and heads; those there are kept"
    )
    add_tiny(parser)
    options = parser.parse_args()
    options.texts, options.batch, options.prompts = (512, 4, 64) if options.model == "pocket" else (2048, 8, 128)
    options.held_out, options.new_tokens, options.others, options.learn_tokens = 64, 128, 64, 20_000
    if options.tiny:
        options.steps, options.texts, options.held_out, options.new_tokens = 2, 12, 2, 12
        options.prompts, options.others = 6, 2
        options.learn_tokens = 0 if options.model == "pocket" else 200  # the one learns as the other does
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}")
    with TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / options.model
        folder.mkdir(parents=True, exist_ok=True)
        table(setting_of(options, folder))


if __name__ == "__main__":
    main()
