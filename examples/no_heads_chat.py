"""A drafter for a chat model that has no heads: learn it from questions, then chat with it.

    python examples/no_heads_chat.py
    python examples/no_heads_chat.py --model MODEL --learn-tokens 400000 --max-new-tokens 256

The learned drafter is an n-gram table of what the model writes, with the text so far; a conversation's earlier turns
are part of its text. The built-in model completes Python code and knows no chat, which the turns below suit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TextStreamer

import treeopt

QUESTIONS = ("import os\nimport sys\n", "class Node:\n", "def read(path):\n", "for line in lines:\n", "import re\n")
TURNS = ("def write(path, text):\n", "def read(path):\n")


def ids_of(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """The tokens of a conversation: by the chat template, or joined by newlines where the tokenizer has none."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn a drafter, print what it is expected to give, and chat with and without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="folder or hub name of a causal language model")
    parser.add_argument("--learn-tokens", type=int, default=1000, help="treeopt learn: until more does not pay")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    given = parser.parse_args(arguments)

    base = treeopt.load_base(given.model)
    found = treeopt.learn_drafter(
        base,
        list(QUESTIONS),
        learning=treeopt.Learning(given.learn_tokens, levels=4),
        sizes=(8,),
        max_new_tokens=given.max_new_tokens,
    )
    best = found.recommended
    print(f"learned; fastest here: {best.kind} trees of {best.nodes} nodes, speedup {best.speedup:.2f}")

    with TemporaryDirectory() as folder:
        file = Path(folder, "drafter.safetensors")
        treeopt.save_drafter(found.drafter, file)  # `treeopt learn -o` writes the same file
        for name, drafter in (("nothing learned", None), ("learned", file)):
            print(f"\n--- {name} ---")
            chat(base, drafter, given.max_new_tokens)


def chat(base: Any, drafter: Path | None, max_new_tokens: int) -> None:
    """Answer the turns one after another, streamed, each after the answer to the one before."""
    messages: list[dict[str, str]] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        inputs = ids_of(base.tokenizer, messages).to(base.device)
        streamer = TextStreamer(base.tokenizer, skip_prompt=True)
        print(f"user: {turn.strip()}\nmodel:", end=" ")
        out = base.model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            custom_generate=treeopt.tree_generate,
            drafter=drafter,
            streamer=streamer,
            text_streamer=streamer,  # transformers does not pass `streamer` on
        )
        answer = out.sequences[0, inputs["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": base.tokenizer.decode(answer, skip_special_tokens=True)})
        print(f"[{out.tokens_per_step:.3f} tokens per step]")


if __name__ == "__main__":
    main()
