"""A second, slow implementation of block drafters, in plain tensors, without a cache.

Here: DFlash, DFlash2, Domino, JetSpec, and DSpark with its vanilla, gated and rnn heads.
It reads the tensors by their published names and computes in float32. One call is one block after the anchor.
A row of a layer with sliding attention sees the last `sliding_window` positions, its own counted, and none after it,
unless config.json says so: `is_causal`, `dflash_config.causal` or (speculators) `sliding_window_non_causal`.
Not here: P-EAGLE and attention sinks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Kind = Literal[
    "dflash", "dflash-speculators", "dflash2", "domino", "dspark", "dspark-specforge", "dspark-speculators", "jetspec"
]
Config = Mapping[str, Any]
State = Mapping[str, Tensor]

MARKOV, CONFIDENCE = "markov_head.markov_", "confidence_head.proj"
GATE, JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
SELECTOR = "candidate_selector."
GRU, PROJECTOR = "prefix_gru.weight_", "embed_proj."
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
    if kind == "domino":
        return bool(setting(config, "shift_label", False))
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
        self.theta, self.confidence_normed = rope_theta(self.sizes), True
        self.causality = self._causality()
        # What is not written here is refused: a reference that guessed would prove nothing.
        for key, harmless in UNKNOWN.items():
            if setting(config, key) not in harmless:
                raise NotImplementedError(f"{key} is not here")
        self.layer_types = self.sizes.get("layer_types") or ["full_attention"] * self.sizes["num_hidden_layers"]
        if not set(self.layer_types) <= {"full_attention", "sliding_attention"}:
            raise NotImplementedError("only full and sliding attention are here")
        if self.sizes.get("hidden_act", "silu") != "silu":
            raise NotImplementedError("only silu is here")
        self.markov = MARKOV + "w1.weight" in self.state
        self.markov_type = setting(config, "markov_head_type", "vanilla")
        if self.markov and self.markov_type not in ("vanilla", "gated", "rnn"):
            raise NotImplementedError("only the vanilla, gated and rnn Markov heads are here")
        if "d2t" in self.state and len(self.state["d2t"]) != len(self.head):
            raise ValueError("d2t and the head have different lengths")

    def logits(self, text: Sequence[int], states: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        """The logits of levels 1, 2, ..., each float [draft vocabulary].

        text: t_0..t_n, ids of the base; the last is the anchor. states: float [n, parts*h], at positions 0..n-1.
        drafts: ids of the base, one for each level from the first. They change nothing without a Markov head, a
        selector or a GRU. With one of these the levels end with the one after the last draft.
        """
        results = []
        memory = torch.zeros(setting(self.config, "markov_rank") if self.markov else 0)  # of the rnn head or of Domino
        if self.kind == "domino":
            memory = torch.zeros(setting(self.config, "gru_hidden_dim"))
        for level, slot in enumerate(self._slots(text, states)):
            x = self._norm(slot, "norm")
            scores = self._linear_of(x, self.head)
            if self.markov or self.kind in ("dflash2", "domino"):
                if level > len(drafts):
                    break
                previous = self._previous(text, drafts, level)
                if self.markov:
                    code, memory = self._markov(x, previous, memory)
                    scores = scores + self._linear_of(code, self.state[MARKOV + "w2.weight"])
                elif self.kind == "domino":
                    memory = self._gru(self.embed[previous], memory)  # the first levels, too, advance it
                    if level >= setting(self.config, "pure_draft_prefix_len"):
                        scores = scores + self._correction(x, memory)
                else:
                    scores = self._selected(x, scores, previous)
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

    def _causality(self) -> dict[str, bool]:
        """For each kind of layer, whether a slot of the block does not see those after it."""
        of_all = setting(self.config, "is_causal", setting(self.config, "causal", setting(self.config, "causal_head")))
        if of_all is not None:
            return {"full_attention": of_all, "sliding_attention": of_all}
        free = self.config.get("sliding_window_non_causal", self.config.get("speculators_model_type") == "dflash2")
        return {"full_attention": False, "sliding_attention": not free}

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

    def _markov(self, x: Tensor, previous: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 reads, and the memory for the next level.

        x: the slot after the final norm. memory: float [markov_rank], zeros at the first level.
        """
        code = self._code(previous)
        if self.markov_type == "gated":
            return torch.sigmoid(self._linear(torch.cat([x, code]), GATE)) * code, memory
        if self.markov_type == "rnn":
            keep, new, out = self._linear(torch.cat([memory, code, x]), JOINT).reshape(3, len(code))
            kept = torch.sigmoid(keep)
            return torch.tanh(out), kept * memory + (1 - kept) * torch.tanh(new)
        return code, memory

    def _selected(self, x: Tensor, scores: Tensor, previous: int) -> Tensor:
        """The selector_top_k tokens with the largest scores get a term that depends on the token before.

        The other tokens keep their distances to the smallest of these, so that they stay behind them.
        """
        source, target = self.state[SELECTOR + "predecessor_codebook"], self.state[SELECTOR + "successor_codebook"]
        link = source[previous].float() * self._linear(x, SELECTOR + "hidden_projection")
        chosen = torch.topk(scores, setting(self.config, "selector_top_k")).indices.tolist()
        better = {token: scores[token] + (link * target[token].float()).sum() for token in chosen}
        results = scores - min(scores[token] for token in chosen) + min(better.values())
        for token, score in better.items():
            results[token] = score
        return results

    def _gru(self, embedding: Tensor, memory: Tensor) -> Tensor:
        """The memory of Domino's GRU after one more token. memory: float [gru_hidden_dim], zeros before the anchor.

        The rows of both weights are the reset gate, the update gate and the new memory. There are no biases.
        """
        of_token = self._linear_of(embedding, self.state[GRU + "ih_l0"]).reshape(3, len(memory))
        of_memory = self._linear_of(memory, self.state[GRU + "hh_l0"]).reshape(3, len(memory))
        reset, update = torch.sigmoid(of_token[0] + of_memory[0]), torch.sigmoid(of_token[1] + of_memory[1])
        new = torch.tanh(of_token[2] + reset * of_memory[2])
        return (1 - update) * new + update * memory

    def _correction(self, x: Tensor, memory: Tensor) -> Tensor:
        """What Domino adds to the logits. x: the slot after the final norm."""
        inner = functional.silu(self._linear(torch.cat([x, memory]), PROJECTOR + "0"))
        return self._linear(inner, PROJECTOR + "2")

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
            sliding = self.layer_types[number] == "sliding_attention"
            self.window = self.sizes["sliding_window"] if sliding else None
            self.causal = self.causality[self.layer_types[number]]
            rows = self._layer(context, rows, f"layers.{number}.")
        return rows if from_anchor(self.kind, self.config) else rows[1:]

    def _mask(self) -> Tensor:
        """What stands for a token that is not known yet."""
        own = self.state.get("mask_embedding", self.state.get("mask_embedding.weight"))
        return self.embed[setting(self.config, "mask_token_id")] if own is None else own.float().reshape(-1)

    def _layer(self, context: list[Tensor], rows: list[Tensor], prefix: str) -> list[Tensor]:
        """rows + attention(context, norm of rows), then the MLP with its norm and its residual.

        DFlash2 has a convolution on each side of both.
        """
        normed = [self._norm(row, prefix + "input_layernorm") for row in rows]
        inputs = self._convolved(0, normed, normed, prefix + "attention_conv.")
        mixed = self._attention(context, inputs, prefix + "self_attn.")
        mixed = self._convolved(1, normed, mixed, prefix + "attention_conv.")
        rows = [row + y for row, y in zip(rows, mixed, strict=True)]
        normed = [self._norm(row, prefix + "post_attention_layernorm") for row in rows]
        inputs = self._convolved(0, normed, normed, prefix + "mlp_conv.")
        mixed = self._convolved(1, normed, [self._mlp(x, prefix + "mlp.") for x in inputs], prefix + "mlp_conv.")
        return [row + y for row, y in zip(rows, mixed, strict=True)]

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        gate = functional.silu(self._linear(x, prefix + "gate_proj"))
        return self._linear(gate * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _convolved(self, side: int, normed: list[Tensor], rows: list[Tensor], prefix: str) -> list[Tensor]:
        """The convolution of DFlash2 over the rows of the block, or the rows as they are for the other drafters.

        Row i is the sum over t of kernel[t] * row i - t; there is nothing before the block. The kernel is the base plus
        a number for each tap and each group of channels, which comes from normed row i. Side 0: before. Side 1: after.
        """
        if self.kind != "dflash2":
            return rows
        base = self.state[prefix + "base_kernel"].float()
        taps, group = setting(self.config, "conv_kernel_size"), setting(self.config, "conv_group_size")
        outputs = []
        for i, x in enumerate(normed):
            change = self._linear(x, prefix + "kernel_projection").reshape(2, taps, len(x) // group)
            output = torch.zeros(len(x))
            for t in range(min(taps, i + 1)):
                output = output + (base[side, t] + change[side, t].repeat_interleave(group)) * rows[i - t]
            outputs.append(output)
        return outputs

    def _attention(self, context: list[Tensor], block: list[Tensor], prefix: str) -> list[Tensor]:
        """The block attends to all of the context and to itself, one row and one head at a time.

        Row i of the context has position i. Slot j of the block has position n + j. The context has no input norm.
        With a window a row does not see positions that are `window` or more before its own.
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
            last = n + slot if self.causal else n + len(block) - 1
            seen = [j for j in range(last + 1) if self.window is None or n + slot - j < self.window]
            mixed = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = torch.stack([query[head] @ keys[j][group] for j in seen]) / math.sqrt(width)
                powers = torch.exp(scores - scores.max())
                weights = powers / powers.sum()
                mixed.append(torch.stack([w * values[j][group] for w, j in zip(weights, seen, strict=True)]).sum(0))
            outputs.append(self._linear(torch.cat(mixed), prefix + "o_proj"))
        return outputs

    def _turned(self, x: Tensor, position: int, norm: str) -> Tensor:
        """x: float [heads, head_dim] after the norm of each head, then after rotation."""
        return torch.stack([rotary(head, position, self.theta) for head in self._norm(x, norm)])
