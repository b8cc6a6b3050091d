"""The tokenizer of a base model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.files.bundled import tokenizer_of
from treeopt.models.checkpoint import plain_reason

_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*", "special_tokens_map.json")


def load_tokenizer(name: str, where: str, folder: Path, *, local_files_only: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the checkpoint has none: token ids can be decoded without one.

    Args:
        name: of the model, as given by the user.
        where: folder or hub name.
        folder: of the checkpoint's small files.
        local_files_only: do not use the hub.

    Raises:
        TreeoptError: E304 where the tokenizer cannot be loaded.
    """
    if tokenizer_of(folder) != folder:
        folder = tokenizer_of(folder)
        where = str(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, local_files_only=local_files_only, trust_remote_code=False
        )
    except Exception as error:  # the types that tokenizers raise vary
        if not any(file for pattern in _FILES for file in folder.glob(pattern)):
            return None
        what = f"the tokenizer of {name} cannot be loaded"
        fix = "use the original tokenizer files; without any, prompts must be token ids"
        raise TreeoptError(Code.MODEL_INVALID, what, why=plain_reason(error), fix=fix) from error
    return tokenizer
