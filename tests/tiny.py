"""Makers of tiny random models and heads, without files: real architectures, small enough for one second on a CPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from conftest import ROOT_FOLDER
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads

VOCAB = 61
HIDDEN = 32
WINDOW = 16

_SPREAD = 0.4  # initial standard deviation: with the usual 0.02 a random model repeats one token for ever
_COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_ROTARY = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": _SPREAD,
    "tie_word_embeddings": False,
}
_MIXED = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_LEARNED = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": _SPREAD}
_OPT = {
    "hidden_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": _SPREAD,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_ALIBI = {"d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "initializer_range": _SPREAD}
_LOCAL = {
    "hidden_size": HIDDEN,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": 256,
    "initializer_range": _SPREAD,
}
_RECURRENT = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "initializer_range": _SPREAD}

# Words apart by spaces, so that a conversation's tokens never change when more turns follow.
CHAT = """
{%- for m in messages %}
{{- {'user': '<user>', 'assistant': '<bot>', 'system': '<sys>'}[m.role] }} {{ m.content }}
{{- ' <end> ' if m.role == 'assistant' else ' ' }}
{%- endfor %}
{{- '<bot>' if add_generation_prompt else '' }}
"""

# Name -> (model type, settings). `qwen2-mixed` has full and sliding layers, so it takes one mask a kind of layer.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _ROTARY),
    "mistral": ("mistral", {**_ROTARY, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", _ROTARY),
    "qwen2-mixed": ("qwen2", {**_ROTARY, **_MIXED}),
    "gpt2": ("gpt2", {**_LEARNED, "tie_word_embeddings": False}),
    "qwen3-mixed": ("qwen3", {**_ROTARY, **_MIXED, "head_dim": 8}),
    "gemma2": ("gemma2", {**_ROTARY, "head_dim": 8, "sliding_window": WINDOW, "attn_implementation": "eager"}),
    "gemma3": (
        "gemma3_text",
        {**_ROTARY, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "sliding_window": WINDOW},
    ),
    "phi3": ("phi3", {**_ROTARY, "sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {key: value for key, value in _ROTARY.items() if key != "num_key_value_heads"}),
    "opt": ("opt", _OPT),
    "mpt": ("mpt", _ALIBI),
    "gpt_neo": ("gpt_neo", _LOCAL),
    "mamba": ("mamba", _RECURRENT),
}
# Those that can verify trees.
TREE_FAMILIES = tuple(family for family in FAMILIES if family not in ("mpt", "gpt_neo", "mamba"))


def but_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values of a parametrized test, of which `make test` runs the `quick` ones, and `make test-slow` the others."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


@functools.cache
def family(name: str, seed: int = 0) -> Base:
    """A tiny random model of a family of bench/tiny_families.py, such as one with a recurrent state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT_FOLDER / "bench"))
        made: Any = importlib.import_module("tiny_families")
    return Base(made.tiny_model(name, seed=seed, attention="eager"), None, name)


def tiny_base(family: str, seed: int = 0, **config: Any) -> Base:
    """A random float32 model of one of `FAMILIES`, without a tokenizer; `config` overrides its settings."""
    kind, settings = FAMILIES[family]
    made = AutoConfig.for_model(kind, **{**_COMMON, **settings, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    return Base(model.eval(), None, f"tiny-{family}")


def random_heads(base: Base, num_heads: int, seed: int = 0, *, blocks: int = 1, shared: bool = False) -> MedusaHeads:
    """Random heads for `base`; their LM heads are the base's plus noise, or the base's own where `shared`."""
    rng = torch.Generator().manual_seed(seed)
    hidden = base.hidden_size
    weight = torch.randn(blocks, num_heads, hidden, hidden, generator=rng) * 0.2
    bias = torch.randn(blocks, num_heads, hidden, generator=rng) * 0.2
    own = base.lm_head.weight.detach().cpu() + 0.1 * torch.randn(num_heads, base.vocab_size, hidden, generator=rng)
    return MedusaHeads.from_tensors(weight, bias, None if shared else own).eval()


def cycle_base(seed: int = 0, *, disturbed: float = 0.0) -> Base:
    """A tiny llama whose next token is a fixed permutation of the current one: greedy text that heads can know.

    `disturbed` scales the attention and MLP outputs; above 0 the prefix has a say, and the rule holds only often.
    """
    base = tiny_base("llama", seed)
    rows = torch.nn.functional.normalize(base.model.get_input_embeddings().weight.detach(), dim=-1)
    with torch.no_grad():
        base.model.get_input_embeddings().weight.copy_(rows)
        base.lm_head.weight[cycle(seed)] = rows  # token y -> cycle[y]: the row most like y's embedding
        for layer in base.model.model.layers:
            layer.self_attn.o_proj.weight.mul_(disturbed)
            layer.mlp.down_proj.weight.mul_(disturbed)
    return base


def cycle_heads(base: Base, num_heads: int, seed: int = 0) -> MedusaHeads:
    """Heads of `cycle_base(seed)` that guess as the undisturbed rule says: head h the (h+1)-th token from here."""
    step = cycle(seed)
    rows, lm_heads = base.lm_head.weight.detach()[step], []
    reached = step
    for _ in range(num_heads):
        reached = step[reached]
        lm_head = torch.empty_like(rows)
        lm_head[reached] = rows
        lm_heads.append(lm_head)
    none = torch.zeros(0, num_heads, base.hidden_size, base.hidden_size)
    return MedusaHeads.from_tensors(none, none[..., 0], torch.stack(lm_heads)).eval()


def cycle(seed: int) -> torch.Tensor:
    """int64 [V]: the token after each token in `cycle_base(seed)`; one cycle through the whole vocabulary."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    after = torch.empty_like(order)
    after[order] = order.roll(-1)
    return after


def walk(first: int, length: int, seed: int = 0) -> list[int]:
    """The text of `length` tokens that `cycle_base(seed)` writes from its first token on."""
    after, ids = cycle(seed).tolist(), [first]
    while len(ids) < length:
        ids.append(after[ids[-1]])
    return ids


def chat_base(*, template: str | None = CHAT, disturbed: float = 0.0) -> Base:
    """`cycle_base()` with a tokenizer of whole words and a chat template: `<bot>` is answered by six words and `<end>`.

    Tokens are called w0, w1, ... but for the four that the template uses and `<unk>`, for words unknown.
    """
    path = walk(0, VOCAB)
    words = {token: f"w{token}" for token in range(VOCAB)}
    words |= {path[0]: "<bot>", path[7]: "<end>", path[30]: "<user>", path[45]: "<sys>", path[55]: "<unk>"}
    core = Tokenizer(models.WordLevel({word: token for token, word in words.items()}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<bot>", "<user>", "<sys>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", unk_token="<unk>", additional_special_tokens=special
    )
    tokenizer.chat_template = template
    base = cycle_base(disturbed=disturbed)
    base.model.generation_config.eos_token_id = path[7]
    return Base(base.model, tokenizer, "tiny-chat")
