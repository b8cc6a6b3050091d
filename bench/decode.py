"""Speed of the decoder: host cost, steps and tokens per second, overheads; all measured in one run.

    python bench/decode.py --shared ../shared [--compile] [--repeats 5]

Three times are measured in turn, and their medians taken: the whole step, the model's bare forward on the same inputs,
and the heads' matrix products. Host cost is the step minus the other two. Tokens per second are those of whole calls,
with prefill, on prompts that the trees were not built from.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from timing import add_tiny, judged, machine
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.calibrate.pipeline import run_calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.evaluate.profile import generic_growth
from treeopt.models.base import Base, now
from treeopt.models.compatibility import heads_like
from treeopt.models.given import load_pair
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.encode import encode
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree
from treeopt.verify.session import Session, TreeForward

HEADS = 5
VOCABULARY = 32_000
SMALL_SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY_SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes of a run.

    Args:
        sizes: nodes of the trees; the last is that of single steps.
        known: number of prompts that the trees are built from.
        texts: number of prompts that are decoded.
        new_tokens: tokens of each text.
        steps: timed steps of each decoder.
        rounds: rounds over the texts, after one that is not counted.
        lead_in: steps before the timed ones.
        shape: shape of the model of 110 M parameters.
    """

    sizes: tuple[int, ...] = (4, 6, 8, 12, 16, 24, 32, 48, 64)
    known: int = 96
    texts: int = 8
    new_tokens: int = 160
    steps: int = 60
    rounds: int = 5
    lead_in: int = 3
    shape: Mapping[str, int] = dataclasses.field(default_factory=lambda: SMALL_SHAPE)


TINY = Effort((4, 64), known=4, texts=1, new_tokens=8, steps=6, rounds=1, lead_in=1, shape=TINY_SHAPE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--compile", action="store_true", help="also time the compiled tree forward")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of whole texts")
    parser.add_argument("--threads", type=int, default=1)
    add_tiny(parser)
    options = parser.parse_args()
    effort = TINY if options.tiny else Effort(rounds=options.repeats)
    torch.set_num_threads(options.threads)
    print(f"{machine(options.threads)}, torch {torch.__version__}")
    story_model(options.shared, effort, compile=options.compile)
    shape_100m(effort)


def story_model(shared: Path, effort: Effort, *, compile: bool) -> None:
    """tinystories-260k: parts of a step, then tokens per second by size of the Medusa tree."""
    base, loaded = load_pair(
        str(shared / "models" / "tinystories-260k-medusa"), str(shared / "models" / "tinystories-260k"), device="cpu"
    )
    prompts = load_prompts(str(shared / "data" / "story_openings.json"))
    known = dataclasses.replace(prompts, prompts=prompts.prompts[: effort.known])
    calibration = run_calibration(base, loaded, known, max_new_tokens=min(128, effort.new_tokens)).calibration
    texts = [encode(prompt, base.tokenizer, chat_template=True)[0] for prompt in prompts.prompts[-effort.texts :]]
    trees = {n: build_tree(calibration, n, values="independent", weights="uniform") for n in effort.sizes}
    attention = base.model.config._attn_implementation
    print(f"\ntinystories-260k, float32, {attention} attention, {loaded.heads.num_heads} heads with separate LM heads")
    decoder = TreeDecoder(base, loaded.heads, trees[64])
    step, eager, heads = step_parts(decoder, loaded.heads, texts[0], effort, rounds=4)
    bare = f"the eager bare forward does {1 / eager:.0f}/s"
    judged("steps/s at 64 nodes, eager", 1 / step, 350, bare)
    host = step - eager - heads
    judged("host cost of a step at 64 nodes, ms", host * 1e3, 0.25, f"{host / step:.1%} of it", most=True)
    if compile:
        decoder = TreeDecoder(base, loaded.heads, trees[64], compile=True)
        step, _, _ = step_parts(decoder, loaded.heads, texts[0], effort, rounds=4)
        judged("steps/s at 64 nodes, compiled", 1 / step, 500, bare)
    autoregressive = TreeDecoder(base, None, Tree(()))
    baselines: dict[str, Callable[[list[int]], int]] = {
        "stock generate": lambda ids: stock_tokens(base, ids, effort.new_tokens),
        "our loop": lambda ids: len(autoregressive.generate(ids, effort.new_tokens).tokens),
    }
    for nodes, tree in trees.items():
        baselines[f"{nodes} nodes"] = tokens_of(TreeDecoder(base, loaded.heads, tree), effort.new_tokens)
    pace = tokens_per_second(baselines, texts, effort.rounds)
    print(f"{'':16}  tokens/s  to generate  to our loop   ({effort.new_tokens} tokens a text, the Medusa tree by size)")
    for name, rate in pace.items():
        print(f"{name:16}  {rate:8.0f}  {rate / pace['stock generate']:11.2f}  {rate / pace['our loop']:11.2f}")
    best = max((name for name in pace if "nodes" in name), key=pace.__getitem__)
    judged(f"{best}: tokens/s to stock generate", pace[best] / pace["stock generate"], 1.45)
    judged(f"{best}: tokens/s to our loop", pace[best] / pace["our loop"], 1.2)


def shape_100m(effort: Effort) -> None:
    """Llama of 110 M random weights: overhead in bfloat16, host cost at 64 nodes."""
    base, shared, separate = random_pair(effort.shape, torch.bfloat16)
    print("\n100M shape (d 768, 12 layers, V 32,000), bfloat16, eager attention, 5 heads, context 256")
    for name, heads, goal in (("sharing the LM head", shared, 1.35), ("separate LM heads", separate, 1.9)):
        judged(f"overhead of 8 nodes, {name}", overhead(base, heads, 8, effort, context=256), goal, most=True)
    decoder = TreeDecoder(base, shared, generic_growth(64, HEADS, VOCABULARY).tree())
    step, forward, heads_time = step_parts(decoder, shared, [7] * 256, dataclasses.replace(effort, steps=12), rounds=2)
    share = (step - forward - heads_time) / step
    judged("host cost of a step at 64 nodes, share", share, 0.02, f"step {step * 1e3:.1f} ms", most=True)


@torch.inference_mode()
def step_parts(
    decoder: TreeDecoder, heads: MedusaHeads, ids: list[int], effort: Effort, *, rounds: int
) -> tuple[float, float, float]:
    """Median seconds of a step, of the model's bare forward on the same entries, and of the heads."""
    base, tree = decoder.base, decoder.tree
    assert tree is not None
    compiled = compile_tree(tree, base.device)
    heads = heads_like(base, heads)
    spent: list[tuple[float, float, float]] = []
    assert isinstance(decoder.forward, TreeForward)
    verifier = decoder.forward.verifier
    for _ in range(rounds):
        rows = decoder.prefill([ids], effort.steps * (tree.depth + 1))
        for number in range(effort.steps):
            session = rows.session
            assert isinstance(session, Session)
            lengths, tokens = session.lengths, torch.full((1, tree.nodes), 5, device=base.device)
            given = session.inputs(tokens, compiled)
            begin = now(base)
            verifier.forward(**given)
            session.rewind(lengths)
            after_forward = now(base)
            heads(rows.hidden, base.lm_head, tree.depth)
            after_heads = now(base)
            decoder.step(rows)
            end = now(base)
            if number >= effort.lead_in:
                spent.append((end - after_heads, after_forward - begin, after_heads - after_forward))
    step, bare, products = (statistics.median(column) for column in zip(*spent, strict=True))
    return step, bare, products


@torch.inference_mode()
def overhead(base: Base, heads: MedusaHeads, nodes: int, effort: Effort, *, context: int) -> float:
    """Seconds of a tree step over seconds of an autoregressive step of our loop, measured in turn; medians."""
    tree, steps = generic_growth(nodes, HEADS, base.vocab_size).tree(), effort.steps
    decoders = [
        TreeDecoder(base, heads, tree),
        TreeDecoder(base, None, Tree(())),
    ]
    spent: list[list[float]] = [[], []]
    rows = [decoder.prefill([[7] * context], steps * (tree.depth + 1)) for decoder in decoders]
    for number in range(steps):
        for which, decoder in enumerate(decoders):
            decoder.step(rows[which])  # not timed: the processor's caches hold the other decoder's data
            begin = now(base)
            decoder.step(rows[which])
            if number >= effort.lead_in:
                spent[which].append(now(base) - begin)
            if rows[which].session.lengths[0] > context + steps:  # both stay near the same context
                rows[which] = decoder.prefill([[7] * context], steps * (tree.depth + 1))
    return statistics.median(spent[0]) / statistics.median(spent[1])


def tokens_per_second(
    baselines: dict[str, Callable[[list[int]], int]], texts: list[list[int]], repeats: int
) -> dict[str, float]:
    """Median tokens per second over the rounds; in every round each text is decoded by every baseline in turn."""
    rounds: dict[str, list[float]] = {name: [] for name in baselines}
    for number in range(repeats + 1):
        spent, made = dict.fromkeys(baselines, 0.0), dict.fromkeys(baselines, 0)
        for ids in texts:
            for name, run in baselines.items():
                begin = time.perf_counter()
                made[name] += run(ids)
                spent[name] += time.perf_counter() - begin
        if number:
            for name in baselines:
                rounds[name].append(made[name] / spent[name])
    return {name: statistics.median(rates) for name, rates in rounds.items()}


def tokens_of(decoder: TreeDecoder, new_tokens: int) -> Callable[[list[int]], int]:
    """Decode a text with this decoder and count its tokens."""
    return lambda ids: len(decoder.generate(ids, new_tokens).tokens)


def stock_tokens(base: Base, ids: list[int], new_tokens: int) -> int:
    """Decode a text with stock generate and count its tokens."""
    rows = torch.tensor([ids], device=base.device)
    return base.generate(rows, torch.ones_like(rows), new_tokens).shape[1] - len(ids)


def random_pair(shape: Mapping[str, int], dtype: torch.dtype) -> tuple[Base, MedusaHeads, MedusaHeads]:
    """A Llama of random weights, heads that share its LM head, and heads with separate LM heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, vocab_size=VOCABULARY, max_position_embeddings=2048, attn_implementation="eager", eos_token_id=None
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    d = shape["hidden_size"]

    def random(*size: int) -> Tensor:
        return (torch.randn(size) * 0.02).to(dtype)

    weight, bias = random(1, HEADS, d, d), random(1, HEADS, d)
    separate = MedusaHeads.from_tensors(weight, bias, random(HEADS, VOCABULARY, d))
    return Base(model, None, "random"), MedusaHeads.from_tensors(weight, bias, None), separate


if __name__ == "__main__":
    main()
