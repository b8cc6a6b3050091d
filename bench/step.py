"""Where the time of a decode step goes: products of matrices, LM head, attention, masks, drafting, host.

    python bench/step.py MODEL [--dtype float32 bfloat16] [--threads 1] [--context 200] [--nodes 1 2 4 8 16 32]
        [--device cuda]

MODEL is a folder, such as that of bench/smollm2.py. The n-gram drafter has an empty table (`Drafter.untrained`), or is
the file of --drafter. All runs of one size take turns, each after a run of its own that is not timed; figures are
medians in milliseconds:

    bare      the model's own forward: N tokens after `context` cached ones, causal, stock cache, logits of all
    static    a step of a static tree of N nodes without its drafting: masks, forward, acceptance, cache
    per step  the same for trees chosen per step, whose mask differs in every step
    drafting  of both: the choice of the nodes and their tokens

    linear    the products of the layers' weights in the bare forward; LM head, attention and the rest likewise
    bound     the larger of: reading all weights once, and the products at the machine's speed for large matrices
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from timing import add_tiny, judged, machine
from torch import nn
from transformers import DynamicCache

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.evaluate.profile import AcceptFixed, generic_growth, model_texts
from treeopt.files.drafters import load_drafter
from treeopt.models.base import CACHE, Base, load_base, now
from treeopt.policy import TreePolicy

GOAL, SHARE_GOAL, SHARE_NODES = 1.05, 0.03, 16


class Step:
    """A step of a decoder after a text, whose drafts are made beforehand."""

    def __init__(self, decoder: TreeDecoder, text: torch.Tensor) -> None:
        self.decoder, self.rows = decoder, decoder.prefill(list(text), decoder.trees.depth + 1)
        self.start, self.context = self.rows.mark(), text.shape[-1]
        self.drafts = decoder.trees.draft(self.rows.drafting, self.rows.root, self.rows.hidden, self.context)

    def draft(self) -> None:
        self.decoder.trees.draft(self.rows.drafting, self.rows.root, self.rows.hidden, self.context)

    def verify(self) -> None:
        """All of a step but its drafting."""
        drafts = self.drafts
        verified = self.rows.session.verify(drafts.tokens, drafts.tree)
        node, root = self.decoder.acceptance.accept(drafts, verified[0], None)
        self.rows.advance_(drafts, verified, node, root)

    def back(self) -> None:
        self.rows.rewind(self.start)


@contextmanager
def parts_of(base: Base, spent: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a forward's parts to `spent` while the context is open."""
    begun: dict[nn.Module, float] = {}
    names: dict[nn.Module, str] = {base.lm_head: "LM head"}
    for name, module in base.model.named_modules():
        if isinstance(module, nn.Linear):
            names.setdefault(module, "linear")
        elif name.endswith("self_attn"):
            names[module] = "attention"

    def before(module: nn.Module, _given: object) -> None:
        begun[module] = now(base)

    def after(module: nn.Module, _given: object, _found: object) -> None:
        spent[names[module]] += now(base) - begun[module]

    def inside(module: nn.Module, _given: object, _found: object) -> None:
        spent["attention"] -= now(base) - begun[module]  # its products are among the linear ones

    handles = []
    for module in names:
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        if names[module] == "attention":
            handles += [part.register_forward_hook(inside) for part in module.modules() if isinstance(part, nn.Linear)]
    yield
    for handle in handles:
        handle.remove()


def bound(base: Base, tokens: int, repeats: int) -> float:
    """Seconds that the machine needs at least, by its own speed with large matrices of this dtype."""
    weights = [module.weight for module in base.model.modules() if isinstance(module, nn.Linear)]
    size = sum(weight.numel() for weight in weights)
    wide = torch.randn(1024, 1024).to(base.device, base.dtype)
    tall = torch.randn(1 << 15, 1024).to(base.device, base.dtype)
    # Of a multiplication, and of reading a weight.
    product = statistics.median(timed(base, lambda: wide @ wide) for _ in range(repeats)) / 1024**3
    read = statistics.median(timed(base, lambda: tall.sum()) for _ in range(repeats)) / tall.numel()
    return max(size * read, size * tokens * product)


def timed(base: Base, run: Callable[[], object], undo: Callable[[], object] = lambda: None) -> float:
    """Seconds of the second of two runs, each of which is undone."""
    run()
    undo()
    begin = now(base)
    run()
    seconds = now(base) - begin
    undo()
    return seconds


@torch.inference_mode()
def measure(base: Base, drafter: Drafter, nodes: int, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of everything for one size, and of each kind the ratio and share that are judged."""
    text = model_texts(base, 1, options.context)
    cache = DynamicCache(config=base.model.config)
    base.outputs(text, cache=cache, logits_to_keep=1)
    ids = text[:, -nodes:]
    steps = {}
    if nodes > 1:
        tree = dataclasses.replace(generic_growth(nodes, drafter.depth, 16).tree(nodes), drafter=drafter.id)
        policy = TreePolicy(nodes, drafter.depth, drafter.id)
        for name, plan in (("static", tree), ("per step", policy)):
            steps[name] = Step(TreeDecoder(base, None, plan, drafter=drafter, acceptance=AcceptFixed()), text)

    def bare() -> None:
        base.model(ids, **{CACHE: cache})

    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.repeats):
        spent["bare"].append(timed(base, bare, lambda: cache.crop(-nodes)))
        for name, step in steps.items():
            spent[name].append(timed(base, step.verify, step.back))
            spent[f"drafting, {name}"].append(timed(base, step.draft, step.back))
        parts: dict[str, float] = defaultdict(float)
        with parts_of(base, parts):
            bare()
        cache.crop(-nodes)
        for name, seconds in parts.items():
            spent[name].append(seconds)
    found = {name: statistics.median(seconds) for name, seconds in spent.items()}
    found["rest"] = found["bare"] - found["linear"] - found["LM head"] - found["attention"]
    found["bound"] = bound(base, nodes, options.repeats)
    for kind in steps:
        turns = list(zip(spent["bare"], spent[kind], spent[f"drafting, {kind}"], strict=True))
        found[f"{kind}, ratio"] = statistics.median(step / one for one, step, _ in turns)
        shares = ((draft + max(0.0, step - one)) / (draft + step) for one, step, draft in turns)
        found[f"{kind}, share"] = statistics.median(shares)
    return found


def report(base: Base, drafter: Drafter, options: argparse.Namespace) -> None:
    """The table of one dtype, and its goals."""
    attention = base.model.config._attn_implementation
    print(f"\n{base.name}, {base.dtype_name}, {attention} attention, {options.context} tokens cached")
    columns = ["bare", "static", "per step", "drafting, static", "drafting, per step"]
    columns += ["linear", "LM head", "attention", "rest", "bound"]
    print("nodes  " + "  ".join(columns))
    for nodes in options.nodes:
        found = measure(base, drafter, nodes, options)
        cells = (f"{found[name] * 1e3:{len(name)}.2f}" if name in found else " " * len(name) for name in columns)
        print(f"{nodes:5}  " + "  ".join(cells), flush=True)
        for kind in ("static", "per step"):
            if kind in found:
                judged(f"{kind}, {nodes} nodes, over the bare forward", found[f"{kind}, ratio"], GOAL, most=True)
                if nodes == SHARE_NODES:
                    judged(f"{kind}: drafting and host, of the step", found[f"{kind}, share"], SHARE_GOAL, most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", help="file of treeopt learn, without heads")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=11)
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.nodes, options.repeats, options.context = [1, 4], 1, 20
    torch.set_num_threads(options.threads)
    print(f"{machine(options.threads)}, torch {torch.__version__}")
    for dtype in options.dtype:
        base = load_base(options.model, dtype=dtype, device=options.device)
        drafter = load_drafter(options.drafter) if options.drafter else Drafter.untrained(base.vocab_size)
        report(base, drafter, options)


if __name__ == "__main__":
    main()
