"""The tokenizer beside a base model's weights."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.checkpoint import plain_reason

_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*", "special_tokens_map.json")


def load_tokenizer(name: str, where: str, folder: Path, *, local_files_only: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the checkpoint has none: decoding ids works without.

    Args:
        name: what the user calls the model.
        where: folder or hub name.
        folder: where the checkpoint's small files are.
        local_files_only: ask no hub.

    Raises:
        TreeoptError: E304 where there is one that cannot be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, local_files_only=local_files_only, trust_remote_code=False
        )
    except Exception as error:  # what tokenizers raise on damaged files varies
        if not any(file for pattern in _FILES for file in folder.glob(pattern)):
            return None
        what = f"the tokenizer of {name} cannot be loaded"
        fix = "take the tokenizer files of its author; a folder without any serves where prompts are token ids"
        raise TreeoptError(Code.MODEL_INVALID, what, why=plain_reason(error), fix=fix) from error
    return tokenizer
