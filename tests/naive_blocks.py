"""A second, slow implementation of the block drafters DFlash, DSpark and JetSpec, in plain tensors, without a cache.

It reads the tensors by their published names and computes in float32. One call is one block after the anchor.
Not here: DFlash2, Domino, P-EAGLE, sliding attention, attention sinks, and the gated and rnn heads of DSpark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Kind = Literal["dflash", "dflash-speculators", "dspark", "dspark-specforge", "dspark-speculators", "jetspec"]
Config = Mapping[str, Any]
State = Mapping[str, Tensor]

MARKOV, CONFIDENCE = "markov_head.markov_", "confidence_head.proj"
# Keys that change the forward in a way that is not written down, and their values that do nothing.
UNKNOWN = {
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "final_logit_softcapping": (None, 0, 0.0),
    "output_multiplier": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
}


def layer_sizes(config: Config) -> Config:
    """The part of config.json that has the sizes of the layers."""
    return config.get("transformer_layer_config") or config


def is_speculators(config: Config) -> bool:
    """Whether config.json is in the layout of speculators."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def setting(config: Config, key: str, default: Any = None) -> Any:
    """A value from dflash_config, or from the top level if it is not there."""
    nested = config.get("dflash_config") or {}
    return nested[key] if key in nested else config.get(key, default)


def head_width(sizes: Config) -> int:
    """The width of one attention head."""
    return int(sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"])


def rope_theta(sizes: Config) -> float:
    """The base of the rotary angles, from the top level or from rope_parameters. Only the default RoPE is here."""
    parameters = sizes.get("rope_parameters") or {}
    scaling = parameters | (sizes.get("rope_scaling") or {})
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise NotImplementedError("only the default RoPE is here")
    return float(sizes.get("rope_theta") or parameters.get("rope_theta") or 10000.0)


def default_ids(drafter_layers: int, layers: int) -> list[int]:
    """The numbers of the base's layers that a drafter with so many layers reads if its config.json has no ids."""
    if drafter_layers == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (drafter_layers - 1)) for i in range(drafter_layers)]


def read_states(config: Config, layers: int) -> tuple[int, ...]:
    """The indices into the base's hidden states that the drafter reads, in the order of their concatenation.

    Index 0 is the embeddings. Index `layers` is the last state after the final norm of the base.
    aux_hidden_state_layer_ids (speculators) are used as they are. target_layer_ids are numbers of layers: 1 is added.
    """
    if is_speculators(config):
        return tuple(config["aux_hidden_state_layer_ids"])
    ids = setting(config, "target_layer_ids")
    if not ids:
        ids = default_ids(layer_sizes(config)["num_hidden_layers"], layers)
    return tuple(index + 1 for index in ids)


def from_anchor(kind: Kind, config: Config) -> bool:
    """Whether slot 0 of the block predicts the first draft. If not, it predicts nothing."""
    return bool(setting(config, "sample_from_anchor", kind.startswith("dspark")))


def levels_of(kind: Kind, config: Config) -> int:
    """How many drafts a block has."""
    return int(setting(config, "block_size")) - (0 if from_anchor(kind, config) else 1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotary(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate x: float [head_dim]. Number j of the first half is paired with number j of the second half."""
    half = len(x) // 2
    angles = torch.tensor([position / theta ** (2 * j / len(x)) for j in range(half)], dtype=x.dtype)
    first, second = x[:half], x[half:]
    cosines, sines = torch.cos(angles), torch.sin(angles)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines])


class NaiveBlock:
    """One block drafter: its tensors, its config.json, and the embeddings and the head of its base.

    The drafter's own embeddings and head are used if `state` has them.
    `confidence_normed`: the confidence head reads the slot after the final norm. If set to False: before it.
    """

    def __init__(
        self, kind: Kind, config: Config, state: State, embeddings: Tensor, lm_head: Tensor, layers: int
    ) -> None:
        self.kind, self.config, self.sizes = kind, config, layer_sizes(config)
        self.state = {name.removeprefix("logit_head."): tensor for name, tensor in state.items()}
        self.parts, self.levels, self.vocab = len(read_states(config, layers)), levels_of(kind, config), len(embeddings)
        self.embed = self.state.get("embed_tokens.weight", embeddings).float()
        self.head = self.state.get("lm_head.weight", lm_head).float()
        self.theta, self.confidence_normed = rope_theta(self.sizes), False
        self.causal = bool(setting(config, "causal_head", False) or setting(config, "causal", False))
        for key, harmless in UNKNOWN.items():
            if setting(config, key) not in harmless:
                raise NotImplementedError(f"{key} is not here")
        if any(name != "full_attention" for name in self.sizes.get("layer_types") or ()):
            raise NotImplementedError("only full attention is here")
        if self.sizes.get("hidden_act", "silu") != "silu":
            raise NotImplementedError("only silu is here")
        self.markov = MARKOV + "w1.weight" in self.state
        if self.markov and setting(config, "markov_head_type", "vanilla") != "vanilla":
            raise NotImplementedError("only the vanilla Markov head is here")
        if "d2t" in self.state and len(self.state["d2t"]) != len(self.head):
            raise ValueError("d2t and the head have different lengths")

    def logits(self, text: Sequence[int], states: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        """The logits of levels 1, 2, ..., each float [draft vocabulary].

        text: t_0..t_n, ids of the base; the last is the anchor. states: float [n, parts*h], at positions 0..n-1.
        drafts: ids of the base, one for each level from the first. They change nothing without a Markov head.
        With a Markov head the levels end with the one after the last draft.
        """
        results = []
        for level, slot in enumerate(self._slots(text, states)):
            scores = self._linear_of(self._norm(slot, "norm"), self.head)
            if self.markov:
                if level > len(drafts):
                    break
                previous = self._previous(text, drafts, level)
                scores = scores + self._linear_of(self._code(previous), self.state[MARKOV + "w2.weight"])
            results.append(scores)
        return results

    def confidence(self, text: Sequence[int], states: Tensor, drafts: Sequence[int]) -> list[float]:
        """For each level, the probability that its draft is accepted if those before it are.

        The levels end with the one after the last draft if the head reads the token before.
        """
        results = []
        with_markov = bool(setting(self.config, "confidence_head_with_markov", False))
        for level, slot in enumerate(self._slots(text, states)):
            x = self._norm(slot, "norm") if self.confidence_normed else slot
            if with_markov:
                if level > len(drafts):
                    break
                x = torch.cat([x, self._code(self._previous(text, drafts, level))])
            results.append(float(torch.sigmoid(self._linear(x, CONFIDENCE))))
        return results

    def target(self, ids: Sequence[int]) -> list[int]:
        """The ids of the base for ids of the draft vocabulary: draft + d2t[draft]."""
        offsets = self.state.get("d2t")
        if offsets is None or len(offsets) == self.vocab:
            return list(ids)
        return [draft + int(offsets[draft]) for draft in ids]

    def _previous(self, text: Sequence[int], drafts: Sequence[int], level: int) -> int:
        """The token before the draft of this level. Level 0 is the first: the anchor is before it."""
        return text[-1] if level == 0 else drafts[level - 1]

    def _code(self, token: int) -> Tensor:
        """The row of the Markov head for a token before."""
        return self.state[MARKOV + "w1.weight"][token].float()

    def _linear_of(self, x: Tensor, weight: Tensor) -> Tensor:
        """x times a weight without a bias."""
        return functional.linear(x, weight.float())

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """x times a weight, plus its bias if there is one."""
        y = self._linear_of(x, self.state[f"{name}.weight"])
        bias = self.state.get(f"{name}.bias")
        return y if bias is None else y + bias.float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm with a named weight."""
        return rms(x, self.state[f"{name}.weight"].float(), self.sizes["rms_norm_eps"])

    def _slots(self, text: Sequence[int], states: Tensor) -> list[Tensor]:
        """The outputs of the last layer, before the final norm, for the slots that predict, the first level first."""
        assert states.shape == (len(text) - 1, self.parts * self.sizes["hidden_size"])
        context = [self._norm(self._linear(row.float(), "fc"), "hidden_norm") for row in states]
        rows = [self.embed[text[-1]]]  # slot 0 is the anchor
        rows += [self._mask() for _ in range(int(setting(self.config, "block_size")) - 1)]
        for number in range(self.sizes["num_hidden_layers"]):
            rows = self._layer(context, rows, f"layers.{number}.")
        return rows if from_anchor(self.kind, self.config) else rows[1:]

    def _mask(self) -> Tensor:
        """What stands for a token that is not known yet."""
        own = self.state.get("mask_embedding", self.state.get("mask_embedding.weight"))
        return self.embed[setting(self.config, "mask_token_id")] if own is None else own.float().reshape(-1)

    def _layer(self, context: list[Tensor], rows: list[Tensor], prefix: str) -> list[Tensor]:
        """rows + attention(context, norm of rows), then the MLP with its norm and its residual."""
        normed = [self._norm(row, prefix + "input_layernorm") for row in rows]
        outputs = []
        for before, mixed in zip(rows, self._attention(context, normed, prefix + "self_attn."), strict=True):
            row = before + mixed
            x = self._norm(row, prefix + "post_attention_layernorm")
            gate = functional.silu(self._linear(x, prefix + "mlp.gate_proj"))
            outputs.append(row + self._linear(gate * self._linear(x, prefix + "mlp.up_proj"), prefix + "mlp.down_proj"))
        return outputs

    def _attention(self, context: list[Tensor], block: list[Tensor], prefix: str) -> list[Tensor]:
        """The block attends to all of the context and to itself, one row and one head at a time.

        Row i of the context has position i. Slot j of the block has position n + j. The context has no input norm.
        """
        heads, groups = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        width, n = head_width(self.sizes), len(context)
        keys, values = [], []
        for position, x in enumerate(context + block):
            key = self._linear(x, prefix + "k_proj").reshape(groups, width)
            keys.append(self._turned(key, position, prefix + "k_norm"))
            values.append(self._linear(x, prefix + "v_proj").reshape(groups, width))
        outputs = []
        for slot, x in enumerate(block):
            query = self._turned(self._linear(x, prefix + "q_proj").reshape(heads, width), n + slot, prefix + "q_norm")
            seen = n + slot + 1 if self.causal else n + len(block)
            mixed = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = torch.stack([query[head] @ keys[j][group] for j in range(seen)]) / math.sqrt(width)
                powers = torch.exp(scores - scores.max())
                weights = powers / powers.sum()
                mixed.append(torch.stack([weights[j] * values[j][group] for j in range(seen)]).sum(0))
            outputs.append(self._linear(torch.cat(mixed), prefix + "o_proj"))
        return outputs

    def _turned(self, x: Tensor, position: int, norm: str) -> Tensor:
        """x: float [heads, head_dim] after the norm of each head, then after rotation."""
        return torch.stack([rotary(head, position, self.theta) for head in self._norm(x, norm)])


def layer_shapes(sizes: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of one layer."""
    h, inner, width = sizes["hidden_size"], sizes["intermediate_size"], head_width(sizes)
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    shapes |= {"self_attn.q_proj.weight": (queries, h), "self_attn.k_proj.weight": (keys, h)}
    shapes |= {"self_attn.v_proj.weight": (keys, h), "self_attn.o_proj.weight": (h, queries)}
    shapes |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    shapes |= {"mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h), "mlp.down_proj.weight": (h, inner)}
    return {prefix + name: shape for name, shape in shapes.items()}


def random_state(
    kind: Kind, config: Config, seed: int, embeddings: Tensor | None = None, lm_head: Tensor | None = None
) -> dict[str, Tensor]:
    """Random tensors with the published names and shapes.

    Layouts with their own embeddings and head get copies of `embeddings` and `lm_head` (of its rows that are in the
    draft vocabulary), or random ones where these are not given.
    """
    sizes, generator = layer_sizes(config), torch.Generator().manual_seed(seed)
    h, vocab = sizes["hidden_size"], sizes["vocab_size"]
    draft_vocab = config.get("draft_vocab_size") or vocab
    parts = len(read_states(config, 4))  # how many there are does not depend on the base
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, parts * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for number in range(sizes["num_hidden_layers"]):
        shapes |= layer_shapes(sizes, f"layers.{number}.")
    if kind.startswith("dspark"):
        rank = setting(config, "markov_rank")
        shapes |= {MARKOV + "w1.weight": (vocab, rank), MARKOV + "w2.weight": (draft_vocab, rank)}
        if setting(config, "enable_confidence_head", False):
            beside = rank if setting(config, "confidence_head_with_markov", False) else 0
            shapes |= {CONFIDENCE + ".weight": (1, h + beside), CONFIDENCE + ".bias": (1,)}
    own = kind == "dspark" or kind.endswith("-speculators")
    if own:
        shapes |= {"embed_tokens.weight": (vocab, h), "lm_head.weight": (draft_vocab, h)}
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        state[name] = 1 + 0.1 * noise if len(shape) == 1 and name.endswith("weight") else 0.2 * noise
    ids = torch.arange(vocab)
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        state["d2t"] = ids - torch.arange(draft_vocab)
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    if own and embeddings is not None:
        state["embed_tokens.weight"] = embeddings.detach().clone()
    if own and lm_head is not None:
        state["lm_head.weight"] = lm_head.detach()[ids].clone()
    return state


def layer_config(layers: int) -> dict[str, Any]:
    """The sizes of a small drafter with so many layers."""
    return {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": layers,
        "vocab_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }


def zlab_config(layers: int, **others: Any) -> dict[str, Any]:
    """The config.json of a drafter in the layout of z-lab: DFlash and JetSpec."""
    config = layer_config(layers) | {"architectures": ["DFlashDraftModel"], "num_target_layers": 6} | others
    if "rope_parameters" in config:
        del config["rope_theta"]
    return config


def deepspec_config(**others: Any) -> dict[str, Any]:
    """The config.json of a DSpark drafter in the layout of DeepSpec."""
    return (
        layer_config(2)
        | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 6, "num_anchors": 4}
        | {"block_size": 5, "mask_token_id": 95, "target_layer_ids": [0, 2, 3]}
        | {"markov_rank": 6, "markov_head_type": "vanilla"}
        | {"enable_confidence_head": False, "confidence_head_with_markov": False}
        | others
    )


def speculators_config(algorithm: str, layers: int, **others: Any) -> dict[str, Any]:
    """The config.json of a drafter in the layout of speculators, with ids that are indices of hidden states."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5 if algorithm == "dspark" else 4}
    return {
        "architectures": ["DSparkSpeculator" if algorithm == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "base", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer_config(layers),
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "mask_token_id": 95,
        "block_size": 5,
        "sample_from_anchor": algorithm == "dspark",
        "draft_vocab_size": 96,
    } | others


IDS = {"mask_token_id": 95, "target_layer_ids": [0, 2, 3]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
HEADS = {"markov_rank": 6, "markov_head_type": "vanilla"}
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": False}
SURE_WITH_MARKOV = {"enable_confidence_head": True, "confidence_head_with_markov": True}

CONFIGS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "dflash": ("dflash", zlab_config(2, block_size=5, dflash_config=IDS)),
    "dflash-inner-block": ("dflash", zlab_config(3, dflash_config=IDS | {"block_size": 5}, **ROPE)),
    "dflash-default-ids": ("dflash", zlab_config(3, block_size=5, dflash_config={"mask_token_id": 95})),
    "dflash-one-layer": ("dflash", zlab_config(1, block_size=5, dflash_config={"mask_token_id": 95})),
    "dflash-causal": ("dflash", zlab_config(2, block_size=5, dflash_config=IDS | {"causal": True})),
    "dflash-speculators": ("dflash-speculators", speculators_config("dflash", 2)),
    "dflash-speculators-part": ("dflash-speculators", speculators_config("dflash", 3, draft_vocab_size=40)),
    "dspark": ("dspark", deepspec_config()),
    "dspark-confidence": ("dspark", deepspec_config(**SURE)),
    "dspark-confidence-markov": ("dspark", deepspec_config(**SURE_WITH_MARKOV)),
    "dspark-specforge": (
        "dspark-specforge",
        layer_config(2)
        | {"architectures": ["DSparkDraftModel"], "num_target_layers": 6}
        | {"dflash_config": IDS | HEADS | SURE_WITH_MARKOV | {"block_size": 5, "projector_type": "dspark"}},
    ),
    "dspark-speculators": ("dspark-speculators", speculators_config("dspark", 2, **HEADS, **SURE)),
    "dspark-speculators-part": (
        "dspark-speculators",
        speculators_config("dspark", 2, draft_vocab_size=40, **HEADS, **SURE_WITH_MARKOV),
    ),
    "jetspec": ("jetspec", zlab_config(3, block_size=5, dflash_config=IDS | {"causal_head": True})),
}
