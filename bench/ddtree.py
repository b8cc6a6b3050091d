"""DDTree's trees by the probabilities of all tokens, beside those by the 256 likeliest tokens of each level.

    python bench/ddtree.py [--draft FOLDER] [--texts 20]

The row of DDTree in `compare` and in bench/modules.py normalises the probabilities of a level over its 256 likeliest
tokens. Printed are the share of the probability that these have, by level, and tokens per step of both, by replay on
the model's answers to built-in prompts. The draft is a block drafter of pocket.
"""

from __future__ import annotations

import argparse

import torch
from drafting import SIZES
from timing import add_tiny, machine
from torch import Tensor

from treeopt.drafting.interface import Observed
from treeopt.evaluate import eagle2
from treeopt.models.base import Base
from treeopt.models.draft_files import load_draft
from treeopt.models.given import load_pair
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts


def taus_and_shares(base: Base, draft: Base, texts: list[Text], known: int) -> tuple[list[float], Tensor]:
    """Tokens per step at each size, by so many tokens of a level, and the share of probability that they have."""
    proposer = eagle2.ddtree_drafter(base, draft, known)
    packed, shares = proposer.pack, list[Tensor]()

    def pack(logits: Tensor) -> Observed:
        shares.append(logits.softmax(-1).topk(min(known, logits.shape[-1])).values.sum(-1))
        return packed(logits)

    proposer.pack = pack  # type: ignore[method-assign]
    traces = eagle2.per_step_traces(base, proposer, texts)
    return [eagle2.tokens_per_step(traces, nodes) for nodes in SIZES], torch.cat(shares).mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="tests/data/pocket-dflash", help="block drafter without a head of its own")
    parser.add_argument("--texts", type=int, default=20)
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base, _ = load_pair("pocket", None, dtype="float32", device="cpu")
    draft = load_draft(options.draft, base)
    most = 16 if options.tiny else 128
    encoded = encode_prompts(base, load_prompts("pocket", limit=2 if options.tiny else options.texts), most).texts
    texts = answer_all(base, encoded, AnswerOptions(max_new_tokens=most))[0]
    tokens = sum(len(text.answer) for text in texts)
    print(f"{machine(1)}; pocket, {draft.name}; {len(texts)} texts, {tokens:,} tokens")
    print(f"{'nodes':24}", *(f"{nodes:>8}" for nodes in SIZES))
    for known in (256, draft.vocab_size):
        taus, shares = taus_and_shares(base, draft, texts, known)
        print(f"{f'{known:,} likeliest':24}", *(f"{tau:8.3f}" for tau in taus))
        print("  share of probability by level:", " ".join(f"{share:.1%}" for share in shares))


if __name__ == "__main__":
    main()
