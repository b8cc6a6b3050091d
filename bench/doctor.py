"""Whether `treeopt doctor` names planted faults, and is silent about sound drafters.

    python bench/doctor.py [--only NAME] [--checkpoints FOLDER] [--shared SHARED]

Faults are planted in trained drafters: in copies of their files where a fault can be written there, and read as they
are; else each variant that a kind admits, taken as if it were the file. A planted fault counts where it lowers the
hits of level 1 or 2 by more than two standard errors. From 20 texts, of two sets of prompts each, the first cause must
be the variant that undoes it (goal: 95 % of those that count). Sound drafters, the finished ones and states of
trainings (`make_module.py RECIPE CHECKPOINTS/NAME --all-states`), must have no variant that fits better. A row has the
drafter, the fault, the hits of levels 1 and 2 without it, with it, and as the first cause reads it, and the first
causes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from timing import add_tiny, judged, machine
from torch import Tensor, nn

from treeopt.defaults import EAGLE, MTP
from treeopt.evaluate.wiring import ORDER, Hits, check_wiring, hits_of, kept_states, wired
from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import DraftModule
from treeopt.models.given import load_pair
from treeopt.models.heads import MedusaHeads
from treeopt.models.hub import find_base
from treeopt.models.variants import Draft, as_heads, variants_of
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.verify.probe import same_route

GOAL, COUNTS, TEXTS, TOKENS, SETS = 0.95, 2.0, 20, 64, 2
SEEN = 600  # prompts of AlpacaEval that the drafters of SmolLM2 were trained on
DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
# Names of variants, and those that undo them where these are others.
UNDONE = {
    "states of one layer above": "states of one layer below",
    "norms as 1 + w": "norms as w, not 1 + w",
    "rotary embedding interleaved": "rotary embedding in halves",
    "embedding before state": "state before embedding",
    "residual of the normed state": "residual of the state",
    "chained state before the norm": "chained state after the norm",
    "embedding of the state's own token": "of the token after",
    "mask in the root's row": "root in its row",
    "rows that see the whole block": "rows that see the rows before",
    "first level by the row after the root": "first level by the root's row",
    "without the head that reads the token above": "with the head that reads the token above",
    "heads without residual": "heads with residual",
    "heads of one level below": "heads of one level above",
    "d2t as tokens, not distances": "d2t as distances",
}
UNDONE |= {other: one for one, other in UNDONE.items()}
WHOLE_WIRINGS = ("state before embedding",)  # of EAGLE-3, which undoes itself
WRITTEN = (
    "states of one layer",
    "states in reversed",
    "norms as",
    "rotary embedding in halves",
    "state before embedding",
)
NEEDS_OTHER_FILE = (
    "state before the final norm",
    "state of one layer below",
    "LM head of the base",
    "embeddings of the base",
)


def trained_heads_before_norm(base: Base, heads: MedusaHeads) -> MedusaHeads:
    """Heads as if they were trained on states before the final norm; their variants are of the same class."""
    norm = final_norm(base)

    class NormedHeads(MedusaHeads):
        def features(self, hidden: Tensor, first: int | None = None) -> Tensor:
            return super().features(norm(hidden), first)

    return as_heads(heads, NormedHeads)


def planted(base: Base, draft: Draft, in_files: bool) -> Iterator[tuple[str, Draft, set[str]]]:
    """Faulty drafters: the name of the fault, the drafter, and the names of variants that undo it.

    With `in_files` without those that `planted_in_files` writes.
    """
    for one in variants_of(base, draft):
        if one.name in NEEDS_OTHER_FILE or (in_files and one.name.startswith(WRITTEN)):
            continue
        faulty = one.draft
        if isinstance(faulty, Base) and one.reads != faulty.model.wiring.reads:
            if not faulty.model.wiring.project:
                continue  # no file of an MTP layer names its state
            faulty = with_wiring(faulty, reads=one.reads)
        undone = {UNDONE.get(one.name, one.name), *([one.name] if one.name in WHOLE_WIRINGS else [])}
        yield one.name, faulty, undone | ({ORDER} if one.name.startswith("heads of") else set())
    if isinstance(draft, MedusaHeads):
        order = [*range(1, draft.num_heads), 0]
        yield ORDER, as_heads(draft, MedusaHeads, order), {ORDER}
        yield "state before the final norm", trained_heads_before_norm(base, draft), {"state before the final norm"}
        if draft.token_map is None:
            head = (
                base.lm_head.weight.detach().expand(draft.num_heads, -1, -1) if draft.lm_head is None else draft.lm_head
            )
            other = as_heads(draft, MedusaHeads)
            other.lm_head = nn.Parameter(shuffled(head.detach(), 1), requires_grad=False)
            yield "LM head of another base", other, {"LM head of the base"}
        return
    model = draft.model
    last = int(base.model.config.get_text_config().num_hidden_layers)
    if last in model.wiring.reads and not model.wiring.project:
        yield "state before the final norm", trained_before_norm(base, draft), {"state before the final norm"}
    if not in_files and model.token_map is not None and len(model.token_map) == base.vocab_size:
        faulty = copied(draft)
        faulty.model.get_output_embeddings().weight.data = shuffled(model.get_output_embeddings().weight.detach(), 0)
        yield "LM head of another base", faulty, {"LM head of the base"}


def planted_in_files(base: Base, files: Path, folder: Path) -> Iterator[tuple[str, Draft, set[str]]]:
    """The same, of faults that are written into a copy of a module's files."""
    config, tensors = json.loads((files / "config.json").read_text()), load_file(files / "model.safetensors")
    text = json.dumps(config)
    [ids] = {tuple(map(int, one.split(","))) for one in re.findall(r'layer_ids": \[([\d, ]+)\]', text)}
    last = int(base.model.config.num_hidden_layers)
    for name, more, undone in (("one above", 1, "one layer below"), ("one below", -1, "one layer above")):
        other = [one + more for one in ids]
        if min(other) >= -1 and max(other) < last:
            moved = re.sub(r'(layer_ids": )\[[\d, ]+\]', rf"\g<1>{other}", text)
            yield f"file: layers {name}", written(base, folder, moved, tensors), {f"states of {undone}"}
    if len(set(ids)) > 1:
        backwards = re.sub(r'(layer_ids": )\[[\d, ]+\]', rf"\g<1>{list(ids[::-1])}", text)
        yield "file: layers reversed", written(base, folder, backwards, tensors), {"states in reversed order"}
    for name, more, undone in (("less 1", -1, "norms as 1 + w"), ("and 1", 1, "norms as w, not 1 + w")):
        moved_norms = {key: one + more if one.dim() == 1 and "norm" in key else one for key, one in tensors.items()}
        yield f"file: norms {name}", written(base, folder, text, moved_norms), {undone}
    turned = {key: neighbours(one, config, key) for key, one in tensors.items()}
    yield "file: rotary pairs are neighbours", written(base, folder, text, turned), {"rotary embedding interleaved"}
    wide = [key for key, one in tensors.items() if key.startswith("midlayer.self_attn") and one.shape[1] > len(one) > 0]
    wide = [key for key in wide if tensors[key].shape[1] == 2 * base.hidden_size]
    if wide:
        halves = {key: one.roll(base.hidden_size, 1) if key in wide else one for key, one in tensors.items()}
        yield "file: state before embedding", written(base, folder, text, halves), {"state before embedding"}
    if "lm_head.weight" in tensors and "d2t" in tensors:
        head = {**tensors, "lm_head.weight": shuffled(tensors["lm_head.weight"], 0)}
        yield "file: LM head of another base", written(base, folder, text, head), {"LM head of the base"}


def neighbours(weight: Tensor, config: dict[str, Any], key: str) -> Tensor:
    """Queries and keys whose rotated pairs i and i + half become neighbours, row by row."""
    size = config["head_dim"]
    if not key.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
        return weight
    made = weight.clone()
    for start in range(0, len(weight), size):
        for i in range(size // 2):
            made[start + 2 * i], made[start + 2 * i + 1] = weight[start + i], weight[start + size // 2 + i]
    return made


def written(base: Base, folder: Path, config: str, tensors: dict[str, Tensor]) -> Base:
    """A module of these files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    save_file({key: one.contiguous() for key, one in tensors.items()}, folder / "model.safetensors")
    return load_draft(str(folder), base)


def shuffled(weight: Tensor, dim: int) -> Tensor:
    """Weights of which half of the tokens' rows are those of other tokens."""
    chance = torch.Generator().manual_seed(0)
    order = torch.arange(weight.shape[dim])
    half = torch.randperm(len(order), generator=chance)[: len(order) // 2]
    order[half] = half[torch.randperm(len(half), generator=chance)]
    return weight.index_select(dim, order)


def copied(draft: Base) -> Base:
    import copy

    shared, draft.model.of_base = draft.model.of_base, ()
    model = copy.deepcopy(draft.model)
    draft.model.of_base = model.of_base = shared
    return Base(model, draft.tokenizer, draft.name)


def with_wiring(draft: Base, **changed: Any) -> Base:
    made = copied(draft)
    made.model.wiring = dataclasses.replace(made.model.wiring, **changed)
    return made


def final_norm(base: Base) -> Any:
    """The norm before the LM head."""
    return base.model.model.norm


def trained_before_norm(base: Base, draft: Base) -> Base:
    """A module that norms the states that it is given by the base's final norm first."""
    made, norm = copied(draft), final_norm(base)
    kind = type(made.model)
    made.model.__class__ = type("BeforeNorm", (kind,), {"states": lambda self, read: kind.states(self, norm(read))})
    return made


def text_sets(base: Base, prompts: str, first: int = 0, *, tiny: bool = False) -> list[list[Text]]:
    """Answers to sets of prompts that do not overlap, from prompt number `first` on."""
    found, count, tokens = [], 2 if tiny else TEXTS, 8 if tiny else TOKENS
    for number in range(1 if tiny else SETS):
        some = load_prompts(prompts, skip=first + number * count, limit=count)
        encoded = encode_prompts(base, some, tokens)
        found.append(answer_all(base, encoded.texts, AnswerOptions(tokens, batch_size=count))[0])
    return found


def shares(hits: Hits) -> str:
    """The hit rates of levels 1 and 2."""
    return " ".join(f"{rate:.1%}" for rate in hits.rates[:2])


def lowers(sound: Hits, faulty: Hits) -> bool:
    """Whether a fault lowers the hits of level 1 or 2 by more than `COUNTS` standard errors."""
    parts = [sound, faulty]
    for level in (slice(0, 1), slice(1, 2)):
        one, other = (Hits(part.name, part.hits[:, level], part.positions[:, level]) for part in parts)
        if one.hits.shape[1] and other.hits.shape[1]:
            mean, error = one.gain(other)
            if mean > COUNTS * error and mean > 0:
                return True
    return False


def measured(base: Base, draft: Draft, texts: Sequence[Text]) -> Hits:
    variant = wired(base, draft)
    return hits_of(base, variant, texts, kept_states(base, texts, sorted(set(variant.reads))))


def matrix(base: Base, draft: Draft, kind: str, sets: Sequence[Sequence[Text]], folder: Path) -> tuple[int, int, int]:
    """Print a row for each fault; the faults that count, the cases of these, and those that were named.

    Faulty files are written into a folder.
    """
    counted = cases = named = 0
    files = None if isinstance(draft, MedusaHeads) or draft.name == MTP else find_base(draft.name)
    faults = planted(base, draft, files is not None)
    faults = itertools.chain(faults, planted_in_files(base, files, folder)) if files is not None else faults
    both = [text for texts in sets for text in texts]
    sound = measured(base, draft, both)
    for fault, faulty, undone in faults:
        if isinstance(faulty, Base) and isinstance(draft, Base) and isinstance(draft.model, DraftModule):
            same_route(faulty, draft)
        faulty_hits = measured(base, faulty, both)
        figures = f"{shares(sound)}\t{shares(faulty_hits)}"
        if not lowers(sound, faulty_hits):
            print(f"{kind}\t{fault}\t{figures}\t\twithout effect", flush=True)
            continue
        counted += 1
        said, cured = [], list[str]()
        for texts in sets:
            found = check_wiring(base, faulty, texts)
            better = found.better and not found.too_weak
            best = found.better[0].name if better else "too weak" if found.too_weak else "as trained"
            cured += [shares(found.better[0])] if better else []
            said.append(best)
            cases += 1
            named += best in undone
        shown = " | ".join(dict.fromkeys(said))
        print(f"{kind}\t{fault}\t{figures}\t{cured[0] if cured else ''}\t{shown}", flush=True)
    return counted, cases, named


def alarms(base: Base, drafts: Sequence[Draft], sets: Sequence[Sequence[Text]], least: float) -> tuple[int, int]:
    """Sound drafters with at least so many hits of level 1, and the alarms about them."""
    sound = false = 0
    for number, draft in enumerate(drafts):
        texts = sets[number % len(sets)]
        found = check_wiring(base, draft, texts)
        if found.wired.rates[0] < least:
            continue
        sound += 1
        false += bool(found.better) or found.too_weak
        if found.better:
            print(f"alarm\t{number}\t{found.better[0].name}\t{found.better[0].gain(found.wired)}", flush=True)
    return sound, false


def checkpoints(draft: Base, folder: Path, name: str) -> list[Base]:
    """A drafter with the weights of its training's states in a folder, `NAME/weights-*.pt`."""
    found = []
    for path in sorted(folder.glob(f"{name}/weights-*.pt")):
        state = torch.load(path, weights_only=True)["module"]
        made = copied(draft)
        made.model.load_state_dict({key: one for key, one in state.items() if key != "wired"}, strict=False)
        found.append(made)
    return found


def drafters() -> Iterator[tuple[str, Base, Draft, str]]:
    """The trained drafters of the repository: a name, the base, the drafter, and prompts."""
    base, loaded = load_pair("pocket", None, dtype="float32", device="cpu")
    assert loaded is not None
    yield "heads", base, loaded.heads, "pocket"
    yield "eagle", base, load_draft("pocket-eagle3", base), "pocket"
    for name in ("pocket-dflash", "pocket-dspark"):
        if (DATA / name).exists():
            yield name.removeprefix("pocket-"), base, load_draft(str(DATA / name), base), "pocket"
    hybrid = load_base(str(DATA / "hybrid"), dtype="float32", device="cpu")
    yield "mtp", hybrid, load_draft("mtp", hybrid), "pocket"


def drafters_of_others(shared: Path) -> Iterator[tuple[str, Base, Draft, str]]:
    """The same of models that are not in the repository; SmolLM2 is that of `python bench/smollm2.py build/smollm2`."""
    stories = load_base(str(shared / "models" / "tinystories-260k"), dtype="float32", device="cpu")
    draft: Draft = load_draft(str(DATA / "tinystories-eagle3"), stories)
    yield "tinystories", stories, draft, str(shared / "data" / "story_openings.json")
    smollm2, heads = load_pair(str(DATA / "smollm2-heads"), "build/smollm2", dtype="bfloat16", device="cpu")
    yield "smollm2-heads", smollm2, heads.heads, str(shared / "data" / "alpaca_eval.json")
    for name in ("eagle3", "dflash"):
        draft = load_draft(str(DATA / f"smollm2-{name}"), smollm2)
        yield f"smollm2-{name}", smollm2, draft, str(shared / "data" / "alpaca_eval.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="folder of states of the trainings of pocket's modules")
    parser.add_argument("--only", help="the name of one drafter")
    parser.add_argument("--shared", type=Path, help="of drafters of tinystories and SmolLM2 instead")
    add_tiny(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine(1)}; {TEXTS} texts of {TOKENS} tokens, {SETS} times")
    totals, kinds, sound, false = [0, 0, 0], dict[str, int](), 0, 0
    for name, base, draft, prompts in drafters() if given.shared is None else drafters_of_others(given.shared):
        if given.only not in (None, name):
            continue
        sets = text_sets(base, prompts, SEEN if name.startswith("smollm2") else 0, tiny=given.tiny)
        with tempfile.TemporaryDirectory() as folder:
            found = matrix(base, draft, name, sets, Path(folder))
        kinds[name] = found[0]
        totals = [one + more for one, more in zip(totals, found, strict=True)]
        drafts: list[Draft] = [draft] * len(sets)
        if given.checkpoints is not None and isinstance(draft, Base):
            drafts += checkpoints(draft, given.checkpoints, f"pocket-{'eagle3' if name == EAGLE else name}")
        whole = measured(base, draft, sets[0]).rates[0]
        more, wrong = alarms(base, drafts, sets, 0.7 * whole)
        sound, false = sound + more, false + wrong
    counted, cases, named = totals
    print(f"faults that count {counted} ({', '.join(f'{name} {count}' for name, count in kinds.items())})")
    judged(f"share of {cases} cases that are named as the first cause", named / max(1, cases), GOAL)
    print(f"sound drafters {sound}, alarms {false}{', MISSED' if false else ''}")


if __name__ == "__main__":
    main()
