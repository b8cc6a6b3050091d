"""Limits of the texts that trees can be verified in, beyond the model's context: two kinds of models have them.

- GPT-Neo's masks depend on cache indices, and are as large as the context. They hide nothing that a tree needs as long
  as all entries that are read, drafts included, are within every layer's window.
- `longrope` has two sets of rotary frequencies, and one set for all tokens of a forward: the second as soon as any
  position is beyond the original context. A tree that crosses this position would read its text with the other set.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from treeopt.errors import Code, TreeoptError
from treeopt.verify.cache import ALIGN


def index_window(config: PreTrainedConfig) -> int | None:
    """The least window, in cache entries, of a model whose masks depend on cache indices; None for other models."""
    text = config.get_text_config()
    layers = getattr(text, "attention_layers", None)  # GPT-Neo's name
    if layers is None:
        return None
    windows = [text.max_position_embeddings, *([text.window_size] if "local" in layers else [])]
    return min(map(int, windows))


def tree_context(context: int, config: PreTrainedConfig, nodes: int) -> int:
    """Maximum number of tokens of a text whose steps verify `nodes` nodes; 0 or less where there is none."""
    window = index_window(config)
    return context if window is None else min(context, window - nodes - ALIGN + 1)


def frequency_switch(config: PreTrainedConfig) -> int | None:
    """The number of tokens after which a model takes other rotary frequencies; None for models that never do."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]  # of the model, or a layer
    switches = [each.get("original_max_position_embeddings") for each in kinds if each.get("rope_type") == "longrope"]
    return min((int(switch) for switch in switches if switch), default=None)


def check_frequencies(switch: int, lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raise E503 unless all texts of a batch end before the switch of frequencies, or begin after it.

    The last token of a text is not run through the model, so a text may be one token longer than `switch`.
    """
    if all(length > switch for length in lengths) or max(lengths) + max_new_tokens <= switch + 1:
        return
    crossing = next((length for length in lengths if length <= switch < length + max_new_tokens - 1), None)
    what = (
        "the batch has prompts of both sides"
        if crossing is None
        else f"{crossing} prompt tokens and {max_new_tokens} new ones"
    )
    raise TreeoptError(
        Code.CONTEXT_FULL,
        f"{what}; the rotary frequencies change after {switch} tokens",
        why="with longrope, a tree that crosses this place would read its text with other frequencies",
        fix="prompts that are all longer, or all texts shorter, than that",
    )
