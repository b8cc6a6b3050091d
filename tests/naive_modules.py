"""A second, slow implementation of EAGLE-1, EAGLE-3, P-EAGLE and MTP modules, in plain tensors, without a cache.

It reads the tensors by their published names. Tests compare the drafters of treeopt with it.
One layer of MTP is applied once for each level. Block drafters and mixtures of experts are not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Kind = Literal[
    "eagle1",
    "eagle1-speculators",
    "eagle3",
    "peagle-speculators",
    "peagle-specforge",
    "mtp-deepseek",
    "mtp-qwen",
    "mtp-mimo",
    "mtp-speculators",
]
Config = Mapping[str, Any]
State = Mapping[str, Tensor]

EAGLE3 = ("eagle3", "peagle-speculators", "peagle-specforge")  # the kinds whose layers are those of EAGLE-3
# The names of four parts: norm of the embedding, norm of the state, projection, final norm.
MTP_NAMES = {
    "mtp-deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mtp-qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mtp-mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "mtp-speculators": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


def layer_sizes(config: Config) -> Config:
    """The part of config.json that has the sizes of the layer."""
    return config.get("transformer_layer_config") or config.get("text_config") or config


def is_speculators(config: Config) -> bool:
    """Whether config.json is in the layout of speculators."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def is_peagle(config: Config) -> bool:
    """Whether config.json is that of a P-EAGLE module, in one of its two layouts."""
    named = any("peagle" in name.lower() for name in config.get("architectures") or ())
    return named or config.get("speculators_model_type") == "peagle"


def is_eagle3(config: Config) -> bool:
    """Whether config.json is that of an EAGLE-3 or P-EAGLE module, in one of its two layouts."""
    if is_peagle(config):
        return True
    if is_speculators(config):
        return str(config.get("speculators_model_type", "eagle3")) == "eagle3"
    named = any("eagle3" in name.lower() for name in config.get("architectures") or ())
    return named or "draft_vocab_size" in config or "eagle_config" in config


def read_states(config: Config, layers: int) -> tuple[int, ...]:
    """The indices into the base's hidden states that the module reads, in the order of their concatenation.

    Index 0 is the embeddings. Index `layers` is the last state after the final norm of the base.
    Ids in eagle_config are numbers of layers, so 1 is added. Ids at the top level are used as they are.
    """
    if not is_eagle3(config):  # EAGLE-1 and MTP
        return (layers,)
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested and not is_speculators(config):
        return tuple(index + 1 for index in nested)
    if (of_angelslim := config.get("aux_hidden_states_layer_ids")) is not None:
        return tuple(index + 1 for index in of_angelslim)
    top = config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(top) if top else (2, layers // 2, layers - 3)


def mtp_prefix(kind: Kind, layers: int) -> str:
    """What the names of the tensors of an MTP module begin with."""
    return {
        "mtp-deepseek": f"model.layers.{layers}.",
        "mtp-qwen": "mtp.",
        "mtp-mimo": "model.mtp_layers.0.",
        "mtp-speculators": "mtp_layers.0.",
    }[kind]


def head_width(sizes: Config) -> int:
    """The width of one attention head."""
    return int(sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"])


def rotary(x: Tensor, position: int, theta: float, width: int) -> Tensor:
    """Rotate the first `width` numbers of x: float [head_dim] in two halves, and leave the others."""
    cosines, sines = torch.empty(width), torch.empty(width)
    for j in range(width):
        angle = torch.tensor(float(position)) * (1.0 / theta ** (2 * (j % (width // 2)) / width))
        cosines[j], sines[j] = torch.cos(angle), torch.sin(angle)
    turned, kept = x[:width], x[width:]
    swapped = torch.cat([-turned[width // 2 :], turned[: width // 2]])
    return torch.cat([turned * cosines.to(x.dtype) + swapped * sines.to(x.dtype), kept])


class NaiveModule:
    """One draft module: its tensors, its config.json, and the embeddings and the head of its base.

    EAGLE-3's and P-EAGLE's own embeddings and head are used if `state` has them. EAGLE-1 and MTP use the base's.
    `chain_normed` (MTP only): the next level gets the state after the final norm. If set to False: before it.
    """

    def __init__(
        self, config: Config, state: State, base_embed: Tensor, base_head: Tensor, layers: int, kind: Kind
    ) -> None:
        self.config, self.state, self.layers, self.kind = config, state, layers, kind
        self.sizes, self.vocab, self.embed, self.head = layer_sizes(config), len(base_head), base_embed, base_head
        if kind in EAGLE3:
            self.embed = state.get("embed_tokens.weight", base_embed)
            self.head = state.get("lm_head.weight", base_head)
        self.chain_normed, self.fc_norm = True, config.get("fc_norm") or "fc_norm.0.weight" in state
        parameters = self.sizes.get("rope_parameters") or {}
        scaling = parameters | (self.sizes.get("rope_scaling") or {})
        assert scaling.get("rope_type", scaling.get("type", "default")) == "default", "only the default RoPE is here"
        assert self.sizes.get("hidden_act", "silu") == "silu", "only silu is here"
        self.theta = float(self.sizes.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
        default = 0.25 if kind == "mtp-qwen" else 1.0  # transformers' configuration_qwen3_5
        partial = parameters.get("partial_rotary_factor") or self.sizes.get("partial_rotary_factor") or default
        self.rotary_width = int(head_width(self.sizes) * partial)

    def chain(self, tokens: Sequence[int], states: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        """The logits after the root and after each draft, each float [draft vocabulary].

        tokens: t_0..t_n, ids of the base; the last is the root. states: float [n, parts*h], at positions 0..n-1.
        drafts: ids of the base, one for each level below the root.
        """
        assert len(tokens) >= 2
        assert states.shape[0] == len(tokens) - 1
        # Row i has the state of position i, the token of position i+1, and the position i.
        given, beside = [self._first_state(states[i]) for i in range(states.shape[0])], list(tokens[1:])
        logits = []
        for level in range(len(drafts) + 1):
            scored, handed = self._finished(self._rows(given, beside)[-1])
            logits.append(functional.linear(scored, self.head))
            given.append(handed)
            beside += drafts[level : level + 1]
        return logits

    def parallel(self, tokens: Sequence[int], states: Tensor) -> list[Tensor]:
        """The logits of all levels of P-EAGLE by one forward, each float [draft vocabulary], the first level first.

        tokens and states are those of `chain`. The row of the root gives the first level. After it there is a row for
        each further level, at the next position: the embedding of mask_token_id, and mask_hidden as its state.
        """
        assert len(tokens) >= 2
        assert states.shape[0] == len(tokens) - 1
        given, beside = [self._first_state(states[i]) for i in range(states.shape[0])], list(tokens[1:])
        for _ in range(int(self.config["num_depths"]) - 1):
            given.append(self._first_state(self.state["mask_hidden"].reshape(-1)))
            beside.append(self.config["mask_token_id"])
        rows = self._rows(given, beside)[states.shape[0] - 1 :]
        return [functional.linear(self._finished(row)[0], self.head) for row in rows]

    def target(self, draft_ids: Sequence[int]) -> list[int]:
        """The ids of the base for ids of the draft vocabulary: draft + d2t[draft]."""
        offsets = self.state.get("d2t")
        if self.kind not in EAGLE3 or offsets is None or len(offsets) == self.vocab:
            return list(draft_ids)
        return [draft + int(offsets[draft]) for draft in draft_ids]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """x times a weight, plus its bias if there is one."""
        return functional.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last dimension, in float32. Qwen3.5's weights are added to one."""
        weight = self.state[f"{name}.weight"]
        wide = x.float() / torch.sqrt((x.float() ** 2).mean(-1, keepdim=True) + self.sizes["rms_norm_eps"])
        if self.kind == "mtp-qwen":
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return wide.to(x.dtype) * weight

    def _norm_if_there(self, x: Tensor, name: str) -> Tensor:
        """The norm of x; x itself if the module does not have this norm."""
        return self._norm(x, name) if f"{name}.weight" in self.state else x

    def _first_state(self, state: Tensor) -> Tensor:
        """What a row of level 0 gets for the base's state: EAGLE-3 projects its parts to one, the others take it."""
        if self.kind not in EAGLE3:
            return state
        parts = list(state.chunk(len(read_states(self.config, self.layers))))
        if self.fc_norm:
            parts = [self._norm(part, f"fc_norm.{k}") for k, part in enumerate(parts)]
        joined = torch.cat(parts)
        if self.config.get("norm_before_fc") or "input_norm.weight" in self.state:
            joined = self._norm(joined, "input_norm")
        return self._linear(joined, "fc")

    def _finished(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """What the head gets, and what the row of the next level gets, from the output of the last layer."""
        if self.kind == "eagle1":
            return last, last
        if self.kind == "eagle1-speculators":
            return self._norm_if_there(last, "pre_lm_head_layernorm"), last
        if self.kind in EAGLE3:  # in the midlayer layout norm_output has this meaning beside a norm before fc
            normed = self._norm(last, "norm")
            after = self.config.get("norm_output") and (
                is_speculators(self.config) or self.fc_norm or "input_norm.weight" in self.state
            )
        else:
            normed = self._norm(last, mtp_prefix(self.kind, self.layers) + MTP_NAMES[self.kind][3])
            after = self.chain_normed
        return normed, normed if after else last

    def _rows(self, given: list[Tensor], beside: list[int]) -> list[Tensor]:
        """The output of the last layer for each row. A row attends to itself and to all rows before it."""
        pairs = [(self.embed[token], state) for token, state in zip(beside, given, strict=True)]
        if self.kind in EAGLE3:
            return self._eagle3(pairs)
        if self.kind == "eagle1":
            joined = [self._linear(torch.cat([embedding, state]), "fc") for embedding, state in pairs]
            rows = self._layer(joined, joined, "layers.0.")  # the first layer has no input norm
            for number in range(1, self.sizes["num_hidden_layers"]):
                rows = self._ordinary(rows, f"layers.{number}.")
            return rows
        if self.kind == "eagle1-speculators":
            rows = []
            for embedding, state in pairs:
                embedding = self._norm_if_there(embedding, "embedding_layernorm")
                rows.append(self._linear(torch.cat([embedding, state]), "fusion_fc"))
            inputs = [self._norm_if_there(row, "transformer.input_layernorm") for row in rows]
            return self._layer(inputs, rows, "transformer.")
        prefix = mtp_prefix(self.kind, self.layers)
        of_embedding, of_state, projection, _ = (prefix + name for name in MTP_NAMES[self.kind])
        rows = []
        for embedding, state in pairs:
            both = [self._norm(embedding, of_embedding), self._norm(state, of_state)]
            rows.append(self._linear(torch.cat(both[::-1] if self.kind == "mtp-mimo" else both), projection))
        return self._ordinary(rows, prefix if self.kind != "mtp-qwen" else prefix + "layers.0.")

    def _eagle3(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The first layer over [embedding; state], then the ordinary layers if there are any."""
        first = "midlayer." if "midlayer.self_attn.q_proj.weight" in self.state else "layers.0."
        joined, residual = [], []
        for embedding, state in pairs:
            normed = self._norm(state, first + "hidden_norm")
            joined.append(torch.cat([self._norm(embedding, first + "input_layernorm"), normed]))
            residual.append(normed if self.config.get("norm_before_residual") else state)
        rows = self._layer(joined, residual, first)
        for number in range(1, self.sizes.get("num_hidden_layers", 1)):
            rows = self._ordinary(rows, f"layers.{number}.")
        return rows

    def _ordinary(self, rows: list[Tensor], prefix: str) -> list[Tensor]:
        """A layer with a norm before attention."""
        return self._layer([self._norm(row, prefix + "input_layernorm") for row in rows], rows, prefix)

    def _layer(self, inputs: list[Tensor], residual: list[Tensor], prefix: str) -> list[Tensor]:
        """residual + attention(inputs), then the MLP with its norm and its residual."""
        outputs = []
        for before, mixed in zip(residual, self._attention(inputs, prefix + "self_attn."), strict=True):
            row = before + mixed
            x = self._norm(row, prefix + "post_attention_layernorm")
            gate = functional.silu(self._linear(x, prefix + "mlp.gate_proj"))
            outputs.append(row + self._linear(gate * self._linear(x, prefix + "mlp.up_proj"), prefix + "mlp.down_proj"))
        return outputs

    def _attention(self, inputs: list[Tensor], prefix: str) -> list[Tensor]:
        """Causal attention, one row and one head at a time. Row i has position i."""
        heads, groups = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        width = head_width(self.sizes)
        queries, gates, keys, values = [], [], [], []
        for position, x in enumerate(inputs):
            query = self._linear(x, prefix + "q_proj").reshape(heads, -1)  # [heads, head_dim], or twice that with gates
            queries.append(self._turned(query[:, :width], position, prefix + "q_norm"))
            gates.append(query[:, width:])
            key = self._linear(x, prefix + "k_proj").reshape(groups, width)
            keys.append(self._turned(key, position, prefix + "k_norm"))
            values.append(self._linear(x, prefix + "v_proj").reshape(groups, width))
        outputs = []
        for i in range(len(inputs)):
            mixed = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = torch.stack([queries[i][head] @ keys[j][group] for j in range(i + 1)]) / math.sqrt(width)
                weights = torch.softmax(scores, 0, dtype=torch.float32).to(scores.dtype)
                total = torch.stack([weights[j] * values[j][group] for j in range(i + 1)]).sum(0)
                if self.kind == "mtp-qwen":
                    total = total * torch.sigmoid(gates[i][head])
                mixed.append(total)
            outputs.append(self._linear(torch.cat(mixed), prefix + "o_proj"))
        return outputs

    def _turned(self, x: Tensor, position: int, norm: str) -> Tensor:
        """x: float [heads, head_dim] after the norm of each head, if there is one, and after rotation."""
        if f"{norm}.weight" in self.state:
            x = self._norm(x, norm)
        return torch.stack([rotary(head, position, self.theta, self.rotary_width) for head in x])


def layer_shapes(kind: Kind, sizes: Config, prefix: str, columns: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of one layer whose attention reads `columns` numbers."""
    h, inner, width = sizes["hidden_size"], sizes["intermediate_size"], head_width(sizes)
    heads, attention = sizes["num_attention_heads"] * width, "self_attn."
    rows = {"q": heads * (2 if kind == "mtp-qwen" else 1), "k": sizes["num_key_value_heads"] * width}
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h)}
    shapes |= {"mlp.down_proj.weight": (h, inner), "post_attention_layernorm.weight": (h,)}
    shapes |= {f"{attention}{name}_proj.weight": (rows[name.replace("v", "k")], columns) for name in "qkv"}
    shapes[attention + "o_proj.weight"] = (h, heads)
    biased = "qkv" if kind == "mtp-mimo" or sizes.get("qkv_bias") else "qkvo" if sizes.get("attention_bias") else ""
    shapes |= {f"{attention}{x}_proj.bias": shapes[f"{attention}{x}_proj.weight"][:1] for x in biased}
    if kind == "mtp-qwen" or sizes.get("model_type") == "qwen3":
        shapes |= {f"{attention}{name}_norm.weight": (width,) for name in "qk"}
    shapes |= {} if kind == "eagle1" else {"input_layernorm.weight": (h,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def eagle3_shapes(config: Config, sizes: Config, layers: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of an EAGLE-3 or P-EAGLE module, without d2t and t2d."""
    h, vocab = sizes["hidden_size"], sizes["vocab_size"]
    parts, of_base = len(read_states(config, layers)), config.get("target_hidden_size") or h
    first = "layers.0." if is_speculators(config) or is_peagle(config) else "midlayer."
    shapes = layer_shapes("eagle3", sizes, first, 2 * h) | {first + "hidden_norm.weight": (h,), "norm.weight": (h,)}
    shapes |= {"fc.weight": (h, parts * of_base), "lm_head.weight": (config.get("draft_vocab_size") or vocab, h)}
    for number in range(1, sizes.get("num_hidden_layers", 1)):
        shapes |= layer_shapes("eagle3", sizes, f"layers.{number}.", h)
    shapes |= {f"fc_norm.{number}.weight": (of_base,) for number in range(parts if config.get("fc_norm") else 0)}
    shapes |= {"input_norm.weight": (parts * of_base,)} if config.get("norm_before_fc") else {}
    shapes |= {"embed_tokens.weight": (vocab, h)} if config.get("embed_requires_grad") else {}
    return shapes | ({"mask_hidden": (1, 1, parts * of_base)} if is_peagle(config) else {})


def random_state(kind: Kind, config: Config, layers: int, seed: int) -> dict[str, Tensor]:
    """Random tensors with the published names and shapes. Copies of the base's embeddings and head are left out."""
    sizes, generator = layer_sizes(config), torch.Generator().manual_seed(seed)
    h, vocab = sizes["hidden_size"], sizes["vocab_size"]
    if kind == "eagle1":
        shapes = {"fc.weight": (h, 2 * h)} | layer_shapes(kind, sizes, "layers.0.", h)
        shapes |= {"fc.bias": (h,)} if config.get("bias", True) else {}
        for number in range(1, sizes["num_hidden_layers"]):
            shapes |= layer_shapes("eagle3", sizes, f"layers.{number}.", h)
    elif kind == "eagle1-speculators":  # `layernorms` are those of HASS
        shapes = {"fusion_fc.weight": (h, 2 * h)} | layer_shapes("eagle1", sizes, "transformer.", h)
        shapes |= {"fusion_fc.bias": (h,)} if config["fusion_bias"] else {}
        norms = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
        for name in norms if config["layernorms"] else ():
            shapes[f"{name}.weight"] = (h,)
    elif kind in EAGLE3:
        shapes = eagle3_shapes(config, sizes, layers)
    else:
        prefix = mtp_prefix(kind, layers)
        shapes = layer_shapes(kind, sizes, prefix + ("layers.0." if kind == "mtp-qwen" else ""), h)
        for number, name in enumerate(MTP_NAMES[kind]):
            shapes[f"{prefix}{name}.weight"] = (h, 2 * h) if number == 2 else (h,)
    state = {}
    for name, shape in shapes.items():
        scale = 0.1 if len(shape) == 1 else 1.0 if name == "mask_hidden" else 1 / math.sqrt(shape[-1])
        center = 1.0 if len(shape) == 1 and name.endswith("weight") and kind != "mtp-qwen" else 0.0
        state[name] = center + scale * torch.randn(shape, generator=generator)
    if kind in EAGLE3 and len(state["lm_head.weight"]) < vocab:
        ids = torch.randperm(vocab, generator=generator)[: len(state["lm_head.weight"])].sort().values
        state["d2t"] = ids - torch.arange(len(ids))
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return state


def layer_config(layers: int, **others: Any) -> dict[str, Any]:
    """The sizes of a small module with so many layers."""
    return {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | others


def peagle_speculators(sizes: Config, **others: Any) -> dict[str, Any]:
    """The config.json of a P-EAGLE module in the layout of speculators."""
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": sizes,
        "draft_vocab_size": 96,
        "num_depths": 4,
        "mask_token_id": 95,
    } | others


def peagle_specforge(sizes: Config, **others: Any) -> dict[str, Any]:
    """The config.json of a P-EAGLE module in the layout of SpecForge."""
    top = {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 96, "num_depths": 4, "mask_token_id": 95}
    return dict(sizes) | top | {"norm_before_residual": True} | others


IDS = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
PART = {"draft_vocab_size": 40}

# Modules whose levels all come from one forward: NaiveModule.parallel.
PARALLEL_CONFIGS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "peagle-speculators": ("peagle-speculators", peagle_speculators(layer_config(2, **ROPE), **{IDS: [1, 3, 6]})),
    "peagle-speculators-part": (
        "peagle-speculators",
        peagle_speculators(
            layer_config(3, model_type="qwen3", **ROPE), norm_before_residual=True, embed_requires_grad=True, **PART
        ),
    ),
    "peagle-specforge": ("peagle-specforge", peagle_specforge(layer_config(2, rope_theta=5000.0))),
    "peagle-specforge-part": (
        "peagle-specforge",
        peagle_specforge(
            layer_config(3, rope_theta=10000.0), num_depths=5, mask_token_id=7, norm_before_residual=False, **PART
        ),
    ),
}
