"""Shapes of well-known models by name, as data; no file is read and no torch is imported.

The numbers are those of each model's config.json on the hub, whose repository is the source.
"""

import os
from dataclasses import dataclass
from typing import Any

from treeopt.models.hub import built_in, find_base, here
from treeopt.shape import Attention, Matrix, ModelShape, shape_error, similar


@dataclass(frozen=True)
class Decoder:
    """A decoder of Llama's kind: RMS norms, rotary positions, gated feed-forward layers, perhaps of experts."""

    source: str  # repository of the config
    sizes: tuple[int, int, int, int, int]  # hidden, intermediate (of one expert), layers, query and key-value heads
    vocabulary: int
    context: int
    head_size: int | None = None  # hidden size / heads
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: tuple[int, int] = (1, 1)  # of each feed-forward layer, and how many a token passes through
    window: int | None = None  # of the attention

    def shape(self, name: str) -> ModelShape:
        """The shape, with all parameters of the model."""
        hidden, inner, layers, heads, kv_heads = self.sizes
        size = self.head_size or hidden // heads
        queries, keys = heads * size, kv_heads * size
        total, active = self.experts
        matrices = [
            Matrix("q_proj", queries, hidden, layers),
            Matrix("k_proj", keys, hidden, layers),
            Matrix("v_proj", keys, hidden, layers),
            Matrix("o_proj", hidden, queries, layers),
            *([Matrix("router", total, hidden, layers)] if total > 1 else []),
            Matrix("gate_proj", inner, hidden, layers, total, active),
            Matrix("up_proj", inner, hidden, layers, total, active),
            Matrix("down_proj", hidden, inner, layers, total, active),
        ]
        biases = layers * (queries + 2 * keys) * self.qkv_bias
        norms = (2 * layers + 1) * hidden + layers * 2 * size * self.qk_norm
        return ModelShape(
            name=name,
            hidden=hidden,
            matrices=tuple(matrices),
            attention=(Attention(layers, heads, kv_heads, size, size, self.window),),
            lm_head=Matrix("lm_head", self.vocabulary, hidden),
            tied=self.tied,
            other=self.vocabulary * hidden + biases + norms,
            context=self.context,
            source=self.source,
        )


_LLAMA, _LLAMA3, _QWEN, _QWEN7 = 32_000, 128_256, 151_936, 152_064  # vocabularies
_TIED: Any = {"tied": True, "qkv_bias": True}  # Qwen2.5 up to 3B

NAMED: dict[str, Decoder] = {
    "llama-68m": Decoder("JackFram/llama-68m", (768, 3072, 2, 12, 12), _LLAMA, 2048),
    "llama-7b": Decoder("huggyllama/llama-7b", (4096, 11008, 32, 32, 32), _LLAMA, 2048),
    "llama-13b": Decoder("huggyllama/llama-13b", (5120, 13824, 40, 40, 40), _LLAMA, 2048),
    "llama-33b": Decoder("huggyllama/llama-30b", (6656, 17920, 60, 52, 52), _LLAMA, 2048),
    "llama-65b": Decoder("huggyllama/llama-65b", (8192, 22016, 80, 64, 64), _LLAMA, 2048),
    "llama-2-7b": Decoder("meta-llama/Llama-2-7b-hf", (4096, 11008, 32, 32, 32), _LLAMA, 4096),
    "llama-2-13b": Decoder("meta-llama/Llama-2-13b-hf", (5120, 13824, 40, 40, 40), _LLAMA, 4096),
    "llama-2-70b": Decoder("meta-llama/Llama-2-70b-hf", (8192, 28672, 80, 64, 8), _LLAMA, 4096),
    "vicuna-7b": Decoder("lmsys/vicuna-7b-v1.3", (4096, 11008, 32, 32, 32), _LLAMA, 2048),
    "vicuna-13b": Decoder("lmsys/vicuna-13b-v1.3", (5120, 13824, 40, 40, 40), _LLAMA, 2048),
    "vicuna-33b": Decoder("lmsys/vicuna-33b-v1.3", (6656, 17920, 60, 52, 52), _LLAMA, 2048),
    "llama-3-8b": Decoder("meta-llama/Meta-Llama-3-8B", (4096, 14336, 32, 32, 8), _LLAMA3, 8192),
    "llama-3-70b": Decoder("meta-llama/Meta-Llama-3-70B", (8192, 28672, 80, 64, 8), _LLAMA3, 8192),
    "llama-3.2-1b": Decoder("meta-llama/Llama-3.2-1B", (2048, 8192, 16, 32, 8), _LLAMA3, 131_072, tied=True),
    "llama-3.2-3b": Decoder("meta-llama/Llama-3.2-3B", (3072, 8192, 28, 24, 8), _LLAMA3, 131_072, tied=True),
    "mistral-7b": Decoder("mistralai/Mistral-7B-v0.1", (4096, 14336, 32, 32, 8), _LLAMA, 32_768, window=4096),
    "zephyr-7b": Decoder("HuggingFaceH4/zephyr-7b-beta", (4096, 14336, 32, 32, 8), _LLAMA, 32_768, window=4096),
    "mixtral-8x7b": Decoder("mistralai/Mixtral-8x7B-v0.1", (4096, 14336, 32, 32, 8), _LLAMA, 32_768, experts=(8, 2)),
    "qwen2.5-0.5b": Decoder("Qwen/Qwen2.5-0.5B-Instruct", (896, 4864, 24, 14, 2), _QWEN, 32_768, **_TIED),
    "qwen2.5-1.5b": Decoder("Qwen/Qwen2.5-1.5B-Instruct", (1536, 8960, 28, 12, 2), _QWEN, 32_768, **_TIED),
    "qwen2.5-3b": Decoder("Qwen/Qwen2.5-3B-Instruct", (2048, 11008, 36, 16, 2), _QWEN, 32_768, **_TIED),
    "qwen2.5-7b": Decoder("Qwen/Qwen2.5-7B-Instruct", (3584, 18944, 28, 28, 4), _QWEN7, 32_768, qkv_bias=True),
    "qwen2.5-14b": Decoder("Qwen/Qwen2.5-14B-Instruct", (5120, 13824, 48, 40, 8), _QWEN7, 32_768, qkv_bias=True),
    "qwen2.5-32b": Decoder("Qwen/Qwen2.5-32B-Instruct", (5120, 27648, 64, 40, 8), _QWEN7, 32_768, qkv_bias=True),
    "qwen2.5-72b": Decoder("Qwen/Qwen2.5-72B-Instruct", (8192, 29568, 80, 64, 8), _QWEN7, 32_768, qkv_bias=True),
    "qwen3-0.6b": Decoder("Qwen/Qwen3-0.6B", (1024, 3072, 28, 16, 8), _QWEN, 40_960, 128, tied=True, qk_norm=True),
    "qwen3-1.7b": Decoder("Qwen/Qwen3-1.7B", (2048, 6144, 28, 16, 8), _QWEN, 40_960, 128, tied=True, qk_norm=True),
    "qwen3-4b": Decoder("Qwen/Qwen3-4B", (2560, 9728, 36, 32, 8), _QWEN, 40_960, 128, tied=True, qk_norm=True),
    "qwen3-8b": Decoder("Qwen/Qwen3-8B", (4096, 12288, 36, 32, 8), _QWEN, 40_960, 128, qk_norm=True),
    "qwen3-14b": Decoder("Qwen/Qwen3-14B", (5120, 17408, 40, 40, 8), _QWEN, 40_960, 128, qk_norm=True),
    "qwen3-32b": Decoder("Qwen/Qwen3-32B", (5120, 25600, 64, 64, 8), _QWEN, 40_960, 128, qk_norm=True),
    "qwen3-30b-a3b": Decoder(
        "Qwen/Qwen3-30B-A3B", (2048, 768, 48, 32, 4), _QWEN, 40_960, 128, qk_norm=True, experts=(128, 8)
    ),
}


def named_shape(name: str) -> ModelShape:
    """The shape of a name in `NAMED`, in any case."""
    known = NAMED.get(name.lower())
    if known is None:
        near = similar(name, NAMED)
        hint = f"{', '.join(near)}; or a" if near else "a"
        what = f"no model has the name {name}"
        fix = f"{hint} folder with a config.json; treeopt plan --presets lists all names"
        raise shape_error(what, at=f"--model {name}", why="it is neither a path nor a known shape", fix=fix)
    return known.shape(name.lower())


def model_shape(name: str | os.PathLike[str]) -> ModelShape:
    """The shape of a model; its weights are not loaded.

    Args:
        name: a folder with a config.json or that file, a known name such as `llama-7b` (`treeopt plan --presets`), a
            built-in model, or a repository of the hub. An existing path has precedence.

    Raises:
        TreeoptError: E240 for an unknown name, and models whose arithmetic is not that of a transformer; E201, E203,
            E301 where the config is missing, damaged or not reachable.
    """
    text = os.fspath(name)
    path = here(text)
    plain = os.sep not in text and not text.endswith(".json")  # neither a path nor a repository `owner/name`
    if path is None and built_in(text) is None and (text.lower() in NAMED or plain):
        return named_shape(text)  # raises for an unknown name, with similar ones
    from treeopt.models.config_shapes import config_shape

    folder = path if path is not None else find_base(text)
    return config_shape(folder / "config.json" if folder.is_dir() else folder, text)
