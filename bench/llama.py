"""Tokens per second beside llama.cpp's Python bindings on the same weights, plain and with prompt lookup, in one run.

    python bench/llama.py FOLDER [--drafter FILE] [--dtype bfloat16] [--texts 6] [--shared ../shared]

FOLDER is that of `python bench/smollm2.py FOLDER`; llama.cpp reads the GGUF file that it was made from, whose weights
have 4 bits where ours have 16 or 32. `pip install llama-cpp-python` compiles the bindings, which are no dependency of
treeopt. --drafter is a file of `treeopt learn`; without it drafts come from the text so far. AlpacaEval prompts from
600, one thread, batch 1, greedy, without prefill: seconds from the first token on. The texts of the two differ, since
their weights are rounded differently.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from smollm2 import shared_file
from timing import add_tiny, judged, machine

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.files.drafters import load_drafter
from treeopt.models.base import Base, load_base
from treeopt.policy import TreePolicy
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree

GOAL = 1.1  # of llama.cpp's plain decoding
LOOKUPS = (1, 2, 3, 5)


def rate(streams: Iterator[Iterator[int]]) -> float:
    """Tokens per second after the first token of each stream, which yields numbers of new tokens."""
    tokens, seconds = 0, 0.0
    for stream in streams:
        next(stream)
        begin = time.perf_counter()
        tokens += sum(stream)
        seconds += time.perf_counter() - begin
    return tokens / seconds


def of_llama(gguf: Path, prompts: list[str], new_tokens: int, lookup: int) -> float:
    """Tokens per second of llama.cpp; `lookup` is the number of drafts, 0 for plain decoding."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    options: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    if lookup:
        options |= {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=lookup), "logits_all": True}
    model = Llama(str(gguf), **options)

    def stream(prompt: str) -> Iterator[int]:
        message = {"role": "user", "content": prompt}
        for chunk in model.create_chat_completion([message], max_tokens=new_tokens, temperature=0.0, stream=True):
            if chunk["choices"][0]["delta"].get("content"):  # others have the role, and the reason of the end
                yield 1

    return rate(map(stream, prompts))


def of_decoder(decoder: TreeDecoder, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second of our decoder: the time of a text less that of its first token alone."""
    tokens, seconds = 0, 0.0
    for ids in prompts:
        decoder.generate(ids, new_tokens)  # warm
        begin = time.perf_counter()
        decoder.generate(ids, 1)
        middle = time.perf_counter()
        tokens += len(decoder.generate(ids, new_tokens).tokens) - 1
        seconds += time.perf_counter() - middle - (middle - begin)
    return tokens / seconds


def ours(base: Base, options: argparse.Namespace) -> dict[str, TreeDecoder]:
    """Plain decoding, and per-step trees of 16 nodes."""
    drafter = load_drafter(options.drafter) if options.drafter else Drafter.untrained(base.vocab_size)
    policy = TreePolicy(16, drafter.depth, drafter.id)
    found = {"treeopt, plain": TreeDecoder(base, None, Tree(()))}
    for compiled in (False, True) if options.compile else (False,):
        name = f"treeopt, {drafter.name}, 16 nodes{', compiled' if compiled else ''}"
        found[name] = TreeDecoder(base, None, policy, drafter=drafter, compile=compiled)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="compiled forwards as well")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.texts, options.new_tokens = 1, 4
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}")
    name, gguf = str(options.shared / "data" / "alpaca_eval.json"), shared_file(options.shared)
    texts = [row["instruction"] for row in json.loads(Path(name).read_text())[600 : 600 + options.texts]]
    rates: dict[str, float] = {}
    try:
        for lookup in LOOKUPS[:1] if options.tiny else (0, *LOOKUPS):
            label = f"llama.cpp, lookup {lookup}" if lookup else "llama.cpp, plain"
            rates[label] = of_llama(gguf, texts, options.new_tokens, lookup)
            print(f"{label:40} {rates[label]:7.1f} tokens/s", flush=True)
    except ImportError:
        print("llama.cpp was not measured: `pip install llama-cpp-python` installs its bindings")
    base = load_base(options.folder, dtype=options.dtype, device="cpu")
    prompts = load_prompts(name, skip=600, limit=options.texts)
    ids = [text.prompt for text in encode_prompts(base, prompts, options.new_tokens, chat_template=True).texts]
    for label, decoder in ours(base, options).items():
        rates[label] = of_decoder(decoder, ids, options.new_tokens)
        print(f"{label:40} {rates[label]:7.1f} tokens/s", flush=True)
        plain = rates.get("llama.cpp, plain")
        if plain is not None and decoder.trees.depth:
            judged(f"{label} over llama.cpp, plain", rates[label] / plain, GOAL)


if __name__ == "__main__":
    main()
