"""One step as a record: its tokens are the drafter's, and its accepted path is the text of stock greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny import chat_base, cycle_base, cycle_heads, random_heads, tiny_base, walk
from torch import Tensor

from treeopt.decode import stream
from treeopt.decode.stream import draft_step, token_text
from treeopt.drafter import Drafter
from treeopt.drafting import plans
from treeopt.drafting.interface import Drafts, ProposerSession
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

PROMPT = [3, 17, 40, 8, 22]
TREE = Tree.from_paths(
    [(r,) for r in range(3)] + [(0, r) for r in range(3)] + [(1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0)]
)


def stock(base: Base, prompt: Sequence[int], tokens: int) -> list[int]:
    """The greedy text of the model alone, by a whole forward for each token."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            text.append(int(base.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def logits_after(base: Base, text: Sequence[int]) -> Tensor:
    with torch.no_grad():
        last: Tensor = base.model(torch.tensor([list(text)])).logits[0, -1]
    return last


@pytest.fixture(scope="module")
def base() -> Base:
    """A model whose heads guess most of its text."""
    return cycle_base(disturbed=0.02)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_accepted_path_is_the_greedy_text(base: Base, number: int) -> None:
    """Roots, accepted drafts and the token after them are the stock text, step by step."""
    heads = cycle_heads(base, 3)
    truth = stock(base, PROMPT, 40)
    steps = [draft_step(base, heads, TREE, PROMPT, number=n) for n in range(1, number + 1)]
    emitted = [token for step in steps[:-1] for token in step.accepted_tokens]
    step = steps[-1]
    assert [*emitted, *step.accepted_tokens, step.bonus] == truth[: len(emitted) + len(step.accepted) + 1]
    assert step.number == number
    # No drafted path follows the text further.
    deeper = [node for node in range(1, TREE.nodes) if TREE.parents[node] == step.accepted[-1]]
    assert all(step.tokens[node] != step.bonus for node in deeper)


def test_tokens_are_the_guesses_of_the_heads() -> None:
    """A node of rank r at level h has the token of rank r of head h; its probability is that of the base model."""
    base = tiny_base("llama", 2)
    heads = random_heads(base, 3, 4)
    step = draft_step(base, heads, TREE, PROMPT)
    with torch.no_grad():
        states = base.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0, -1:]
        order = heads(states, base.lm_head, 3)[:, 0].argsort(-1, descending=True).tolist()
    root = stock(base, PROMPT, 1)[0]
    assert step.tokens == (root, *(order[len(path) - 1][path[-1]] for path in TREE.paths))
    assert step.probabilities[0] is None
    for node, path in enumerate(TREE.paths, start=1):
        before = [*PROMPT, root, *(order[level][rank] for level, rank in enumerate(path[:-1]))]
        expected = logits_after(base, before).softmax(-1)[step.tokens[node]]
        assert step.probabilities[node] == pytest.approx(float(expected), rel=1e-4)
    assert step.texts == tuple(map(str, step.tokens))  # ids, as the model has no tokenizer


@pytest.mark.parametrize("number", [2, 4])
def test_per_step_tree_is_the_one_that_the_decoder_drafted(
    base: Base, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths of tokens are those of the decoder's drafts, siblings in their order; the red path is stock text."""
    prompt = [*walk(3, 12), *walk(3, 4)]
    drafter = Drafter.untrained(base.vocab_size)
    policy = TreePolicy(8, drafter.depth, drafter.id)
    made: list[Drafts] = []
    draft = plans.PerStepTrees.draft

    def spy(self: plans.PerStepTrees, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        made.append(draft(self, session, roots, states, context))
        return made[-1]

    monkeypatch.setattr(plans.PerStepTrees, "draft", spy)
    step = draft_step(base, None, policy, prompt, drafter=drafter, number=number)
    drafts = made[number - 1]
    mask, tokens = drafts.tree.attention_mask[0].tolist(), drafts.tokens[0].tolist()
    rows = [tuple(token for token, seen in zip(tokens, row, strict=True) if seen) for row in mask]
    paths = [(), *step.tree.paths]
    known = {path: step.tokens[node] for node, path in enumerate(paths)}
    recorded = [tuple(known[path[:n]] for n in range(len(path) + 1)) for path in paths]
    assert step.tree.nodes == len(rows) > 2
    assert set(recorded) == set(rows)
    for above in set(step.tree.parents):
        siblings = [recorded[node] for node in range(1, step.tree.nodes) if step.tree.parents[node] == above]
        assert siblings == sorted(siblings, key=rows.index)
    before = [
        token
        for earlier in range(1, number)
        for token in draft_step(base, None, policy, prompt, drafter=drafter, number=earlier).accepted_tokens
    ]
    found = [*before, *step.accepted_tokens, step.bonus]
    assert found == stock(base, prompt, len(found))


def test_texts_follow_the_text_before_them(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a token is decoded after the prompt, the steps before, and the path to its node."""
    monkeypatch.setattr(stream, "token_text", lambda _, before, token: " ".join(map(str, [*before, token][-4:])))
    heads = cycle_heads(base, 3)
    earlier = [token for n in (1, 2) for token in draft_step(base, heads, TREE, PROMPT, number=n).accepted_tokens]
    step = draft_step(base, heads, TREE, PROMPT, number=3)
    for node, path in enumerate([(), *TREE.paths]):
        above = [step.tokens[[(), *TREE.paths].index(path[:n])] for n in range(len(path) + 1)]
        assert step.texts[node] == " ".join(map(str, [*PROMPT, *earlier, *above][-4:]))
    line = [*PROMPT, *earlier, *step.accepted_tokens, step.bonus]
    assert step.bonus_text == " ".join(map(str, line[-4:]))


def test_text_ends_inside_a_step() -> None:
    """The path ends at the end token, without a token after it; there is no later step."""
    base = chat_base()
    path = walk(0, 12)  # the answer to `<bot>` ends with path[7]
    heads = cycle_heads(base, 4)
    step = draft_step(base, heads, Tree.chain(4), path[:4])
    assert (step.accepted_tokens, step.bonus) == (tuple(path[4:8]), None)
    assert (step.texts, step.bonus_text) == (
        (" w" + f"{path[4]}", *(f" w{one}" for one in path[5:7]), " <end>", step.texts[4]),
        "",
    )
    with pytest.raises(ValueError, match="ends after 1 step with drafts; there is no step 2"):
        draft_step(base, heads, Tree.chain(4), path[:4], number=2)


def test_root_that_ends_the_text_has_no_step() -> None:
    """A last token alone is not verified, so there is no tree to draw."""
    base = chat_base()
    with pytest.raises(ValueError, match="ends after 0 steps"):
        draft_step(base, cycle_heads(base, 2), Tree.chain(2), walk(0, 7))


def test_one_node_tree_has_steps_without_drafts(base: Base) -> None:
    """The root alone is a tree: every step accepts nothing, and the next token follows."""
    step = draft_step(base, None, Tree(()), PROMPT, number=3)
    truth = stock(base, PROMPT, 4)
    assert (step.accepted_tokens, step.bonus) == ((truth[2],), truth[3])


class Bytes:
    """A tokenizer of single bytes and a word; a part of a character is decoded as a replacement character."""

    words = (b"the", b" ", b"\xe2", b"\x86", b"\x93", b"")

    def decode(self, ids: list[int], **_options: bool) -> str:
        return b"".join(self.words[one] for one in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"


def test_text_of_a_part_of_a_character_is_its_name() -> None:
    """What a token adds is its text; one that completes no character, or adds nothing, has its own name."""
    tokenizer: object = Bytes()
    assert token_text(tokenizer, [0], 1) == " "  # type: ignore[arg-type]
    assert token_text(tokenizer, [0, 1], 0) == "the"  # type: ignore[arg-type]
    assert token_text(tokenizer, [0], 2) == "<2>"  # type: ignore[arg-type]
    assert token_text(tokenizer, [0, 2, 3], 4) == "<4>"  # type: ignore[arg-type]
    assert token_text(tokenizer, [0], 5) == "<5>"  # type: ignore[arg-type]
