"""The teacher-forced pass against the bare forward and the heads' matrix products, in one run.

    python bench/calibrate.py [--threads 1]

Shape: Llama, d 768, V 32,000, random weights, five heads with their own LM heads, texts of 64 + 192 tokens.
"""

from __future__ import annotations

import argparse

import torch
from timing import add_tiny, goal_line, interleaved, machine
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.trace import trace_texts
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.texts.encode import Text
from treeopt.traces import MAX_RANKS

HIDDEN, VOCABULARY, LAYERS, HEADS = 768, 32_000, 12, 5
TINY = (96, 500, 1)  # the first three of these, for a quick run without meaningful figures
TEXTS, PROMPT, ANSWER = 2, 64, 192
GOAL = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    add_tiny(parser)
    options = parser.parse_args()
    d, vocabulary, layers = TINY if options.tiny else (HIDDEN, VOCABULARY, LAYERS)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=d,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
    )
    base = Base(LlamaForCausalLM(config).eval(), None, "random")
    shape = (1, HEADS, d, d)
    heads = MedusaHeads.from_tensors(
        torch.randn(shape) * 0.02, torch.zeros(shape[:3]), torch.randn(HEADS, vocabulary, d) * 0.02
    )
    tokens = torch.randint(vocabulary, (TEXTS, PROMPT + ANSWER))
    texts = [Text(str(i), row[:PROMPT].tolist(), row[PROMPT:].tolist()) for i, row in enumerate(tokens)]
    hidden = torch.randn(TEXTS * ANSWER, d)
    proposers = [HeadsProposer(base, heads)] * TEXTS

    @torch.inference_mode()
    def forward() -> None:
        base.forward(tokens, use_cache=False, logits_to_keep=1)

    @torch.inference_mode()
    def matmuls() -> None:
        for chunk in torch.split(hidden, 100):  # the chunk of the teacher-forced pass at this vocabulary
            heads(chunk)

    parts = {"forward": forward, "heads": matmuls, "pass": lambda: trace_texts(base, proposers, texts, MAX_RANKS)}
    seconds = interleaved(parts, repeats=options.repeats)
    print(f"{machine(options.threads)}, torch {torch.__version__}, float32")
    forward_s, heads_s, pass_s = seconds["forward"], seconds["heads"], seconds["pass"]
    print(f"bare forward {forward_s:.3f} s + heads' products {heads_s:.3f} s; teacher-forced pass {pass_s:.3f} s")
    print(goal_line("teacher-forced pass", pass_s / (forward_s + heads_s), GOAL, "times forward + heads"))


if __name__ == "__main__":
    main()
