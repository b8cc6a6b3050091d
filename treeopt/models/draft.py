"""The draft model: a smaller causal language model with the base's tokenizer, whose guesses the base verifies."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base
from treeopt.models.given import GivenModel, as_base, tokenizer_beside

_SHOWN = 3  # tokens that a message names
_passed: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakSet[PreTrainedModel]] = weakref.WeakKeyDictionary()


def load_draft(name: str, base: Base, *, dtype: str = "auto", device: str = "auto") -> Base:
    """Load a draft model for a base model.

    Args:
        name: folder or hub name; `pocket-draft` is that of the built-in model.
        base: the model that verifies its drafts.
        dtype: as `load_base`.
        device: as `load_base`.

    Raises:
        TreeoptError: as `load_base` and `check_draft`.
    """
    with _named_as_draft():
        draft = load_base(name, dtype=dtype, device=device)
    check_draft(base, draft)
    return draft


@contextlib.contextmanager
def _named_as_draft() -> Iterator[None]:
    """Errors of loading call the model a draft model, and its option --draft."""
    try:
        yield
    except TreeoptError as error:
        error.what = error.what.replace("there is no base model", "there is no draft model", 1)
        error.at, error.fix = (part.replace("--model", "--draft") for part in (error.at, error.fix))
        raise


def as_draft(model: GivenModel | None, base: Base) -> Base | None:
    """The draft model from any accepted form of a model, after `check_draft`; None stays None."""
    if model is None:
        return None
    with _named_as_draft():
        draft = as_base(model, dtype=base.dtype_name)
    check_draft(base, draft)
    return draft


def check_draft(base: Base, draft: Base) -> None:
    """Raise E213 unless the draft model has the base's tokenizer.

    Where both have a tokenizer, here or beside their weights, the two map the same tokens to the same ids; the widths
    of their logits may differ, because some models pad them. Where one has none, the widths are equal. A pair that has
    passed is not compared again.
    """
    passed = _passed.setdefault(base.model, weakref.WeakSet())
    if draft.model in passed:
        return
    fault = ""
    ours, theirs = (_tokenizer(one) for one in (base, draft))
    if ours is not None and theirs is not None:
        fault = _difference(ours, theirs)
    elif base.vocab_size != draft.vocab_size:
        fault = f"it has {draft.vocab_size} tokens, the base {base.vocab_size}, and one of them has no tokenizer"
    if fault:
        raise TreeoptError(
            Code.DRAFT_MISMATCH,
            f"the draft model {draft.name} does not fit {base.name}: {fault}",
            why="its token ids are verified as token ids of the base",
            fix="--draft with a smaller model of the same family, or without --draft: --drafter ngram",
        )
    passed.add(draft.model)


def _tokenizer(model: Base) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, or beside its weights; None also for one that transformers made from nothing."""
    found = model.tokenizer or tokenizer_beside(model.name)
    empty = found is not None and set(found.get_vocab()) <= set(found.all_special_tokens)
    return None if empty else found


def _difference(of_base: PreTrainedTokenizerBase, of_draft: PreTrainedTokenizerBase) -> str:
    """How two vocabularies differ; empty where they do not."""
    ours, theirs = of_base.get_vocab(), of_draft.get_vocab()
    if ours == theirs:
        return ""
    other = [token for token, number in ours.items() if theirs.get(token) != number]
    if not other:
        return f"its tokenizer has {len(theirs) - len(ours)} more tokens"
    shown = ", ".join(f"{token!r}" for token in sorted(other, key=lambda one: ours[one])[:_SHOWN])
    return f"{len(other)} of {len(ours)} tokens have another id in its tokenizer or none, such as {shown}"
