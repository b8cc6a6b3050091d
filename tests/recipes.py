"""The scripts of bench/ that make the built-in models, and the smallest recipes: sizes, and modules with openings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent.parent / "bench"


def script(name: str) -> Any:
    """A module of bench/, whose imports of one another need its folder on the path."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


corpus = script("corpus")
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "layers": 1,
    "intermediate_size": 24,
    "attention_heads": 2,
    "key_value_heads": 1,
    "context": 32,
    "sequences": 2,
    "steps": 3,
    "warmup_steps": 1,
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "seed": 0,
}
SOURCE = "import os\n\n\ndef one(a, b):\n    return a + b\n\n\nclass Two:\n    def three(self):\n        return 3\n\n\n"


def documents() -> tuple[Any, ...]:
    """Three modules with openings, on both sides of one in two."""
    names = [
        name for name in (f"module{i}" for i in range(20)) if corpus.is_unseen(corpus.Document(name, name, ""), 2)
    ][:1]
    names += [
        name for name in (f"module{i}" for i in range(20)) if not corpus.is_unseen(corpus.Document(name, name, ""), 2)
    ][:2]
    texts = {
        name: "".join(SOURCE.replace("(", f"_{name}_{i}(").replace("Two", f"Two{i}") for i in range(4))
        for name in names
    }
    return tuple(corpus.Document(name, f"{name}.py", text) for name, text in texts.items())
