"""The forward over trees: its cost around the model's own forward, captures of `torch.compile`, and cache memory.

    python bench/forward.py --shared ../shared [--repeats 60]

Times are those of tinystories-260k. A decoder's step and the bare forward of the same inputs are run in turn, each
after a run of its own that is not timed, and the medians are compared. `torch.compile` needs a C++ compiler; with
--tiny no code is generated.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from timing import add_tiny, interleaved, judged, machine
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.decode.decoder import TreeDecoder
from treeopt.evaluate.profile import generic_growth
from treeopt.models.base import Base, now
from treeopt.models.given import load_pair
from treeopt.models.heads import MedusaHeads
from treeopt.texts.encode import encode
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree
from treeopt.verify.cache import Arena
from treeopt.verify.session import Session, TreeForward

NODES = 64
BATCH, NEW_TOKENS, PROMPT = 8, 1024, 64  # of the table of memory
SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY_SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--repeats", type=int, default=60, help="timed runs of each step and forward")
    parser.add_argument("--threads", type=int, default=1)
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{machine(options.threads)}, torch {torch.__version__}")
    models = options.shared / "models"
    base, loaded = load_pair(
        str(models / "tinystories-260k-medusa"), str(models / "tinystories-260k"), device="cpu", dtype="float32"
    )
    prompts = load_prompts(str(options.shared / "data" / "story_openings.json"), limit=BATCH).prompts
    texts = [encode(prompt, base.tokenizer, chat_template=True)[0] for prompt in prompts]
    costs(base, loaded.heads, texts[0], repeats=2 if options.tiny else options.repeats)
    # Without code generation a capture takes a second.
    generated = patch("torch.compile", functools.partial(torch.compile, backend="eager"))
    with generated if options.tiny else patch("torch.compile", torch.compile):
        compiled_costs(base, loaded.heads, texts, repeats=2 if options.tiny else options.repeats)
    memory(TINY_SHAPE if options.tiny else SHAPE)


def costs(base: Base, heads: MedusaHeads, ids: list[int], *, repeats: int) -> None:
    """Eager steps of one node and of 64, over the bare forward."""
    print("\ntinystories-260k, float32, eager")
    alone, bare = step_and_forward(TreeDecoder(base, None, Tree(())), ids, repeats)
    more = f"the bare forward takes {bare * 1e3:.2f} ms"
    judged(
        "host cost of a step of one node over a bare one-token forward", (alone - bare) / bare, 0.15, more, most=True
    )
    step, bare = step_and_forward(TreeDecoder(base, heads, tree_of(base, heads)), ids, repeats)
    judged(f"a step's rate over that of the bare forward, {NODES} nodes", bare / step, 0.92, shown(step, bare))


def compiled_costs(base: Base, heads: MedusaHeads, texts: list[list[int]], *, repeats: int) -> None:
    """Compiled steps of 64 nodes over the bare compiled forward, and the captures of texts that cross a bucket."""
    print("\ntinystories-260k, float32, compiled")
    decoder = TreeDecoder(base, heads, tree_of(base, heads), compile=True)
    counters.clear()
    step, bare = step_and_forward(decoder, texts[0], repeats)
    judged(f"a step's rate over that of the bare forward, {NODES} nodes", bare / step, 0.85, shown(step, bare))
    judged("captures of a text in one bucket", captures(), 1, most=True)
    new = 256 - min(map(len, texts))
    decoder.generate(texts[0], new)
    judged("captures with a text that crosses into the next", captures(), 2, most=True)
    decoder.generate(texts, new)
    judged(f"captures with a batch of {len(texts)} rows, which end one after another", captures(), 4, most=True)
    decoder.generate(texts[1], new)
    decoder.generate(texts[::-1], new)
    judged("captures with more texts, alone and in a batch", captures(), 4, most=True)


def captures() -> int:
    """Graphs that `torch.compile` has captured."""
    return counters["stats"]["unique_graphs"]


def shown(step: float, bare: float) -> str:
    return f"{1 / step:.0f} and {1 / bare:.0f} a second; the step includes the heads and the choice of drafts"


def tree_of(base: Base, heads: MedusaHeads) -> Tree:
    return generic_growth(NODES, heads.num_heads, base.vocab_size).tree()


@torch.inference_mode()
def step_and_forward(decoder: TreeDecoder, ids: list[int], repeats: int) -> tuple[float, float]:
    """Median seconds of a decoder's step and of the model's forward on the same inputs, always at one length."""
    rows = decoder.prefill([ids], NODES)
    drafts = decoder.trees.draft(rows.drafting, rows.root, rows.hidden, len(ids))
    forward, session = decoder.forward, rows.session
    assert isinstance(forward, TreeForward)
    assert isinstance(session, Session)
    lengths, mark = session.lengths, rows.mark()
    given = session.inputs(drafts.tokens, drafts.tree)

    def bare() -> None:
        forward.verifier.forward(**given)
        session.rewind(lengths)

    def step() -> None:
        decoder.step(rows)
        rows.rewind(mark)
        session.inputs(drafts.tokens, drafts.tree)

    spent: list[list[float]] = [[], []]
    for number in range(repeats + 3):
        for which, run in enumerate((step, bare)):
            seconds = timed_second(run, decoder.base)
            if number > 2:
                spent[which].append(seconds)
    return statistics.median(spent[0]), statistics.median(spent[1])


def timed_second(run: Callable[[], None], base: Base) -> float:
    """Seconds of the second of two runs."""
    run()
    begin = now(base)
    run()
    return now(base) - begin


@torch.inference_mode()
def memory(shape: dict[str, int]) -> None:
    """Bytes of the cache while a batch is decoded, and the cost of a row that ends."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, vocab_size=512, max_position_embeddings=4096, eos_token_id=None)
    base = Base(LlamaForCausalLM(config).to(torch.bfloat16).eval(), None, "random")
    forward, tree = TreeForward(base, NODES, 1), compile_tree(Tree.from_paths([(rank,) for rank in range(NODES - 1)]))
    each = 2 * 2 * shape["num_hidden_layers"] * shape["hidden_size"]  # bytes of an entry: key and value, 2 bytes each
    at_once = BATCH * (PROMPT + NEW_TOKENS + NODES) * each / 1e6
    session, _, _ = forward.begin([torch.arange(PROMPT)] * BATCH, NEW_TOKENS)
    arena, tokens = session.cache.store.arena, torch.zeros(BATCH, NODES, dtype=torch.long)
    print(f"\ncache of {BATCH} rows, {NEW_TOKENS} new tokens, d {shape['hidden_size']}, bfloat16")
    print(f"new tokens so far  MB now  MB when allocated at once ({at_once:.0f})")
    for made in range(0, NEW_TOKENS + 1, 32):
        session.rewind([PROMPT + made] * BATCH)
        session.inputs(tokens, tree)
        if made in (0, 128, 384, 640, 896, NEW_TOKENS):
            print(f"{made:17}  {arena.bytes / 1e6:6.0f}  {arena.bytes / 1e6 / at_once:.2f} x")
    judged(
        "memory of the cache at the end, over that of the text's entries", arena.bytes / 1e6 / at_once, 1.5, most=True
    )
    ended(session.cache.store.blocks, arena)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"        most memory of this process, with torch and the models: {peak / 1e3:.0f} MB")


def ended(blocks: list[torch.Tensor], arena: Arena) -> None:
    """Cost of dropping the first or the last row of a batch: rows that move in place, and a copy of the cache."""
    used, rows = PROMPT + NEW_TOKENS, list(range(1, BATCH))

    def move() -> None:
        for block in blocks:
            for row, source in enumerate(rows):
                block[:, row, :, :used] = block[:, source, :, :used]

    spent = interleaved({"move": move, "copy": lambda: [block[:, rows] for block in blocks]}, repeats=3)
    print(
        f"        the first of {BATCH} rows ends: {spent['move'] * 1e3:.1f} ms and no memory; a copy takes "
        f"{spent['copy'] * 1e3:.1f} ms and {arena.bytes * (BATCH - 1) / BATCH / 1e6:.0f} MB; the last row: no time"
    )


if __name__ == "__main__":
    main()
