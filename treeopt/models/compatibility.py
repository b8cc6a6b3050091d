"""Whether heads, states and a draft model belong to a base model."""

import copy
import weakref

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.draft_module import StateModule
from treeopt.models.heads import MedusaHeads

_SHOWN = 3  # tokens in a message
_passed: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakSet[PreTrainedModel]] = weakref.WeakKeyDictionary()


def check_states_fit(base: Base, states: Tensor) -> None:
    """Raise E502 where hidden states [..., d] are not as wide as the input of the LM head."""
    width = states.shape[-1]
    if width != base.hidden_size:
        what = f"{base.name} has a layer between its hidden states (width {width}) and its LM head ({base.hidden_size})"
        why = "heads and n-gram drafters give the LM head the hidden states"
        fix = "a draft model, or drafts from the text so far (without --heads, --tree and --drafter)"
        raise TreeoptError(Code.NO_TREES, what, why=why, fix=fix)


def check_heads_fit(base: Base, heads: MedusaHeads, name: str) -> None:
    """Raise E212 unless heads and base have the same hidden size and vocabulary."""
    faults = []
    if heads.hidden_size != base.hidden_size:
        faults.append(f"hidden size {heads.hidden_size}, the base has {base.hidden_size}")
    if heads.vocab_size not in (None, base.vocab_size, base.rows):
        faults.append(f"vocabulary {heads.vocab_size}, the base has {base.vocab_size}")
    if faults:
        what = f"the heads {name} do not fit {base.name}: {'; '.join(faults)}"
        raise TreeoptError(Code.HEADS_MISMATCH, what, fix="name with --model the base model that they were trained on")


def heads_like(base: Base, heads: MedusaHeads, name: str = "given") -> MedusaHeads:
    """The heads on the base's device and in its dtype, a copy where they are not, after `check_heads_fit`."""
    check_heads_fit(base, heads, name)
    if (heads.bias.device, heads.bias.dtype) == (base.device, base.dtype):
        return heads
    return copy.deepcopy(heads).to(base.device, base.dtype)


def check_draft(base: Base, draft: Base) -> None:
    """Raise E213 unless the draft model has the base's tokenizer; a pair that has passed is not compared again.

    The widths of their logits may differ, because some models pad them; where one has no tokenizer they are equal. A
    draft module has the base's vocabulary and reads states of its width.
    """
    if isinstance(draft.model, StateModule):
        _check_module(base, draft.model, draft.name)
        return
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
        what = f"the draft model {draft.name} does not fit {base.name}: {fault}"
        why = "its token ids are verified as token ids of the base"
        fix = "--draft with a smaller model of the same family, or without --draft: --drafter ngram"
        raise TreeoptError(Code.DRAFT_MISMATCH, what, why=why, fix=fix)
    passed.add(draft.model)


def _check_module(base: Base, module: StateModule, name: str) -> None:
    sizes = {
        "hidden size": (module.wiring.state_size, base.model.config.get_text_config().hidden_size),
        "vocabulary": (module.base_vocab_size, base.rows),
        "last state": (max(module.wiring.reads), base.model.config.get_text_config().num_hidden_layers),
    }
    for size, (found, there) in sizes.items():
        of_last = size == "last state" and (module.wiring.project or found == there)  # EAGLE-3 reads states below it
        if found > there or (found < there and not of_last):
            what = f"{name} was not made for {base.name}: its {size} is {found}, the base's {there}"
            raise TreeoptError(Code.DRAFT_MISMATCH, what, fix="--draft with a module of this base, or without --draft")


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


def tokenizer_beside(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the folder or cached repository of a model; None where there is none."""
    if not name:
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except Exception:  # the types that tokenizers raise vary
        return None
    return tokenizer
