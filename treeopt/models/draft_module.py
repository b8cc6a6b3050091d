"""Draft modules: EAGLE heads and MTP layers, which draft from the hidden states of their base model.

A row pairs the embedding of a token with a hidden state: of the base at the token before, and below the first level
that of the parent's row in the module itself. The decoder layers are of a stock class of transformers, so that masks,
positions, caches and experts are its own; only the way in and the way out are made here:

    EAGLE-1, EAGLE-2   x = fc([e; h])                           arXiv:2401.15077, arXiv:2406.16858
    EAGLE-3            the first layer attends with [e; g], g = fc([h_a; h_b; h_c])    arXiv:2503.01840
    P-EAGLE            the same, with rows of a mask for all levels below the first    arXiv:2602.01469
    MTP                x = fc([norm(e); norm(h)])               arXiv:2412.19437, section 2.2

with e the embedding and h, h_a, h_b, h_c states of the base. Embeddings and LM head that a checkpoint does not have are
the base's.

One layer drafts every level, from its own state at the parent. Of several MTP layers, layer d (from 0) drafts level
d + 1: its row of a token, in the text or in a tree, reads the state of layer d - 1 at the token before. Levels below
those of all layers are drafted by the last one. The first d rows of a text have no such state and are hidden.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as embedding_of
from torch.nn.functional import pad
from transformers import AutoModel, Cache, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from treeopt.defaults import MAX_DEPTH, MODEL, MTP
from treeopt.models.base import CACHE

OWN = ("tokens", "wired")  # buffers of a module that no checkpoint has under these names
WIDE = ("q_proj", "k_proj", "v_proj")  # matrices of EAGLE-3's first layer that read [e; g]


@dataclass(frozen=True)
class Wiring:
    """What a draft module computes.

    Args:
        kind: `eagle` or `mtp`, or `block` of P-EAGLE.
        title: the layout of its checkpoint, for messages.
        reads: indices of the base's hidden states that it reads: 0 are the embeddings, i > 0 the output of layer i - 1,
            the number of layers the states after the final norm.
        state_size: width of one of these states.
        wide: whether the first layer attends with embedding and state side by side, as in EAGLE-3.
        project: whether states are projected to the module's width (`fc`) before the first row, as in EAGLE-3.
        bias: whether `fc` has a bias.
        state_first: whether `fc` reads [h; e].
        norms: whether embedding and state are normed before `fc`.
        state_norms: whether each state is normed before `fc` (EAGLE-3.1).
        joint_norm: whether the states side by side are normed before `fc`.
        normed_residual: whether EAGLE-3's first residual is the normed state.
        first_norm: whether the first layer norms its input.
        final_norm: whether there is a norm before the LM head.
        chains_normed: whether the next level reads the state after that norm.
        vocabulary: rows of the module's own LM head; 0 where it has none.
        own_embeddings: whether it has embeddings of its own.
        levels, mask: of P-EAGLE the levels that it drafts in one forward, with rows of the mask below the root; 0
            levels where it drafts any number one after another.
    """

    kind: str
    title: str
    reads: tuple[int, ...]
    state_size: int
    wide: bool = False
    project: bool = False
    bias: bool = False
    state_first: bool = False
    norms: bool = False
    state_norms: bool = False
    joint_norm: bool = False
    normed_residual: bool = False
    first_norm: bool = True
    final_norm: bool = True
    chains_normed: bool = False
    vocabulary: int = 0
    own_embeddings: bool = False
    levels: int = 0
    mask: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """What else decides the drafts, for the fingerprint."""
        return (self.levels, self.mask) if self.levels else ()


class StateModule(PreTrainedModel):
    """A drafter as a model that reads hidden states of a base, with embeddings and LM head of its own or the base's.

    Args:
        config: of its decoder layers.
        wiring: how they are fed and read.
        embeddings, lm_head: the base's. They are neither parameters of the module nor copied with it.
        vocab_size: V, tokens of the base.
    """

    config_class = PreTrainedConfig
    _supports_sdpa = True

    def __init__(
        self, config: PreTrainedConfig, wiring: Any, embeddings: nn.Module, lm_head: nn.Module, vocab_size: int
    ) -> None:
        super().__init__(config)
        self.wiring, self.base_vocab_size = wiring, vocab_size
        if wiring.own_embeddings:
            self.embeddings = nn.Embedding(vocab_size, config.hidden_size)
        if wiring.vocabulary:
            self.lm_head = nn.Linear(config.hidden_size, wiring.vocabulary, bias=False)
            # The base's token of each of the module's: another one where the vocabulary is a part of the base's.
            self.register_buffer("tokens", torch.arange(wiring.vocabulary))
        # In the state, so that modules of equal weights that read other states have another fingerprint.
        flags = [getattr(wiring, field.name) for field in fields(wiring) if field.type == "bool"]
        self.register_buffer("wired", torch.tensor([*wiring.reads, -1, *map(int, flags), *wiring.numbers]))
        self.of_base = (embeddings, lm_head)  # in a tuple, so that they are no parts of the module
        self.generation_config = GenerationConfig()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings if self.wiring.own_embeddings else self.of_base[0]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head if self.wiring.vocabulary else self.of_base[1]

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, n, h] of tokens of the base.

        Inkling's MTP layers read them before their norm, and other modules than MTP layers before Gemma's scale.
        """
        table: Any = self.get_input_embeddings()
        plain = hasattr(table, "embed_norm") or (hasattr(table, "embed_scale") and self.wiring.kind != MTP)
        made: Tensor = embedding_of(tokens, table.weight) if plain else table(tokens)
        return made

    @property
    def levels(self) -> int:
        """The largest number of levels that a draft can have."""
        return self.wiring.levels or MAX_DEPTH

    @property
    def token_map(self) -> Tensor | None:
        """int64 [V_draft], the base's token of each of the module's; None where it has the base's LM head."""
        return self.tokens if self.wiring.vocabulary else None

    def head(self, normed: Tensor) -> Tensor:
        """Logits [..., V_draft] of states after the module's norm, which Inkling divides; it has spare logits, too."""
        logits: Tensor = self.get_output_embeddings()(normed / getattr(self.config, "logits_mup_width_multiplier", 1.0))
        most = getattr(self.config, "unpadded_vocab_size", None)
        return logits[..., :most].to(normed.device)  # the base's LM head may be on another one


class DraftModule(StateModule):
    """A draft module whose forward takes a hidden state beside each token; arguments as `StateModule`.

    `kind` is the class of its decoder where `AutoModel` has none for the config.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        wiring: Wiring,
        embeddings: nn.Module,
        lm_head: nn.Module,
        vocab_size: int,
        kind: type | None = None,
    ) -> None:
        super().__init__(config, wiring, embeddings, lm_head, vocab_size)
        width = config.hidden_size
        self.decoder = stock_decoder(config, kind)
        norm = self.decoder.norm
        if wiring.wide:
            self.decoder.layers[0] = WideLayer(self.decoder.layers[0], width, wiring.normed_residual)
        elif not wiring.first_norm:
            self.decoder.layers[0].input_layernorm = nn.Identity()
        self.decoder.norm = self.decoder.embed_tokens = nn.Identity()
        self.norm = norm if wiring.final_norm else nn.Identity()
        read = len(wiring.reads) * wiring.state_size
        if wiring.project or not wiring.wide:
            self.fc = nn.Linear(read if wiring.project else 2 * width, width, bias=wiring.bias)
        if wiring.norms:
            self.embedding_norm = copy.deepcopy(norm)
            self.state_norm = copy.deepcopy(norm) if wiring.kind == MTP else nn.Identity()
        if wiring.state_norms:
            self.state_norms = nn.ModuleList(_sized(norm, wiring.state_size) for _ in wiring.reads)
        if wiring.joint_norm:
            self.joint_norm = _sized(norm, read)
        if wiring.levels:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, read))
        self.further = nn.ModuleList()  # MTP layers after the first
        self.post_init()

    def append(self, layer: DraftModule) -> None:
        """Add an MTP layer after the last one."""
        self.further.append(layer)
        for part in layer.decoder.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.layer_idx = len(self.further)  # in the cache
        self.config.num_hidden_layers += 1
        if kinds := getattr(self.config, "layer_types", None):
            self.config.layer_types = [*kinds, *layer.config.layer_types]

    @property
    def state_width(self) -> int:
        """Width of the states that a row reads: one of h for each layer."""
        width: int = self.config.hidden_size
        return width * (1 + len(self.further))

    def states(self, read: Tensor) -> Tensor:
        """What the first layer reads in rows of a text, of the base's states side by side: [..., n * d] -> [..., h]."""
        read = read.to(self.device, self.dtype)
        if not self.wiring.project:
            return read
        if self.wiring.state_norms:
            parts = read.reshape(*read.shape[:-1], -1, self.wiring.state_size).unbind(-2)
            read = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], dim=-1)
        if self.wiring.joint_norm:
            read = self.joint_norm(read)
        projected: Tensor = self.fc(read)
        return projected

    def forward(
        self,
        input_ids: Tensor,
        hidden: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: Any = None,
        level: int = 0,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, n, V_draft] and the states that the next level reads, for tokens int64 [B, n] of the base.

        Args:
            input_ids: tokens of the base.
            hidden: float [B, n, state_width], what each row reads, or [B, n, h] for a text from its second token on;
                zeros where not given, as in a probe of masks.
            logits_to_keep: as of stock models.
            output_hidden_states: not read; states are always returned.
            level: of these nodes in the tree; 0 for tokens of the text, whose rows follow each other.
            inputs: mask, positions and cache, as of stock models; several layers with one cache take float masks
                [B, 1, n, m]. Without one each has a cache of its own, which a list returns, and a mask [B, m] or none.
        """
        embedding = self.embedded(input_ids)
        layers: list[DraftModule] = [self, *self.further]
        if hidden is None:  # its logits are those of the first layer
            hidden, layers = torch.zeros_like(embedding), layers[:1]
        width = len(layers) * embedding.shape[-1]
        read = list(pad(hidden, (0, width - hidden.shape[-1])).chunk(len(layers), dim=-1))
        first, last = min(level, len(layers) - 1), len(layers) - 1
        below = [torch.zeros_like(part) for part in read]
        caches = _own_caches(layers, inputs.get(CACHE))
        start = int(inputs["position_ids"][0, 0]) if caches and "position_ids" in inputs else 0
        for number in range(first, len(layers)):
            missing = max(0, number - start) if caches else 0  # rows that have no state to read
            if missing >= input_ids.shape[1]:
                break
            given = _own_inputs(inputs, number, missing, caches[number]) if caches else _hidden_rows(inputs, number)
            out, before, after = layers[number].rows(embedding[:, missing:], read[number][:, missing:], given)
            state = pad(after if self.wiring.chains_normed else before, (0, 0, missing, 0))
            if number == first:
                logits = layers[number].head(_at(after, logits_to_keep))
            if number < last:
                below[number + 1] = state
                if level == 0:  # the row before is that of the token before
                    read[number + 1] = torch.cat([read[number + 1][:, :1], state[:, :-1]], dim=1)
            elif number == first:
                below[number] = state
        cache = {CACHE: caches or getattr(out, CACHE)}
        return CausalLMOutputWithPast(logits=logits, hidden_states=(torch.cat(below, dim=-1),), **cache)

    def rows(self, embedding: Tensor, state: Tensor, inputs: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
        """Outputs of this layer's decoder for embeddings and states [B, n, h], and these before and after its norm."""
        if self.wiring.norms:
            embedding, state = self.embedding_norm(embedding), self.state_norm(state)
        pair = torch.cat([state, embedding] if self.wiring.state_first else [embedding, state], dim=-1)
        out = self.decoder(inputs_embeds=pair if self.wiring.wide else self.fc(pair), **inputs)
        return out, out.last_hidden_state, self.norm(out.last_hidden_state)

    def masks(self, rows: int) -> tuple[Tensor, Tensor]:
        """The rows of P-EAGLE below a root, n = levels - 1: tokens int64 [B, n] and what they read, float [B, n, h]."""
        shape = rows, self.levels - 1
        tokens = torch.full(shape, self.wiring.mask, device=self.mask_hidden.device)
        return tokens, self.states(self.mask_hidden).expand(*shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V_draft] after the root, at states that its children read, [..., state_width]."""
        state = hidden.chunk(1 + len(self.further), dim=-1)[min(1, len(self.further))]
        return self.head(state if self.wiring.chains_normed else self.norm(state))


def draft_reads(model: nn.Module) -> tuple[int, ...]:
    """The base's hidden states that a draft reads, as of `Base.reading`; none where it is no module."""
    return model.wiring.reads if isinstance(model, StateModule) else ()


def most_levels(model: nn.Module) -> int:
    """The largest number of levels that a draft can have: of a block drafter those of its block."""
    return model.levels if isinstance(model, StateModule) else MAX_DEPTH


def kind_of(model: nn.Module) -> str:
    """The kind of a draft, a key of `DRAFT_KINDS`."""
    return model.wiring.kind if isinstance(model, StateModule) else MODEL


def over_tokens(scores: Tensor, model: nn.Module, vocab_size: int) -> Tensor:
    """Scores [..., V_draft] of a draft as those of the base's tokens [..., V]; -inf for others."""
    tokens = model.token_map if isinstance(model, StateModule) else None
    if tokens is None:
        return pad(scores[..., :vocab_size], (0, max(0, vocab_size - scores.shape[-1])), value=-torch.inf)
    return scores.new_full((*scores.shape[:-1], vocab_size), -torch.inf).index_copy(-1, tokens, scores)


def layout_of(model: nn.Module) -> str:
    """The layout of a module, and the number of its MTP layers where these are several; empty for a draft model."""
    if not isinstance(model, StateModule):
        return ""
    further = len(model.further) if isinstance(model, DraftModule) else 0
    return f"{model.wiring.title}, {1 + further} layers" if further else model.wiring.title


def title_of(model: nn.Module) -> str:
    """The layout of a module, and what it reads, for a line of output; empty for a draft model."""
    reads = " ".join(map(str, draft_reads(model)))
    return f"{layout_of(model)}, reads the states {reads} of the base, " if reads else ""


class WideLayer(nn.Module):
    """EAGLE-3's first layer: a stock layer whose attention reads embedding and state side by side."""

    def __init__(self, layer: Any, width: int, normed_residual: bool) -> None:
        super().__init__()
        self.self_attn: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        self.input_layernorm: nn.Module = layer.input_layernorm
        self.hidden_norm = copy.deepcopy(self.input_layernorm)
        self.post_attention_layernorm: nn.Module = layer.post_attention_layernorm
        self.normed_residual = normed_residual
        for name in WIDE:
            matrix = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * width, matrix.out_features, bias=matrix.bias is not None))
        if hasattr(layer, "attention_type"):  # the kind of its mask
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        embedding, state = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(state)
        attended = self.self_attn(hidden_states=torch.cat([self.input_layernorm(embedding), normed], dim=-1), **inputs)[
            0
        ]
        middle = (normed if self.normed_residual else state) + attended
        made: Tensor = middle + self.mlp(self.post_attention_layernorm(middle))
        return made


def stock_decoder(config: PreTrainedConfig, kind: type | None = None) -> Any:
    """The stock decoder of a config, with its rotary embeddings and one token's embedding, which is not used."""
    config = copy.deepcopy(config)
    config.vocab_size, config.pad_token_id = 1, 0
    # Not in the dtype of the config, to which weights would be rounded.
    return AutoModel.from_config(config, dtype=torch.float32) if kind is None else kind(config)


def _sized(norm: Any, width: int) -> nn.Module:
    """A norm of the class of another one, of another width."""
    made: nn.Module = copy.deepcopy(norm)
    made.weight = nn.Parameter(norm.weight.detach().new_ones(width))
    return made


def _own_caches(layers: list[DraftModule], given: Any) -> list[Any]:
    """A cache for each of several layers, given or new ones; none where one is given for all, or there is one layer."""
    if len(layers) == 1 or isinstance(given, Cache):
        return []
    made = [DynamicCache(config=layer.config) for layer in layers] if given is None else list(given)
    for number, cache in enumerate(made):
        cache.layers = cache.layers[:1] * (number + 1)  # at the layer's number in a cache for all, and where masks look
    return made


def _own_inputs(inputs: dict[str, Any], number: int, missing: int, cache: Cache) -> dict[str, Any]:
    """The inputs of a layer with a cache of its own: it never has rows of the first `number` tokens of a text.

    So many of these are missing now.
    """
    cuts = {"attention_mask": number, "position_ids": missing}
    cut = {key: inputs[key][:, count:] for key, count in cuts.items() if inputs.get(key) is not None}
    return {**inputs, **cut, CACHE: cache}


def _hidden_rows(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """The inputs of a layer that has no states of the first `count` rows: later rows do not attend to these."""
    if count == 0:
        return inputs
    mask, rows = inputs["attention_mask"], inputs["position_ids"]
    masks = mask if isinstance(mask, dict) else {"": mask}
    found = {kind: _without(one, count, rows) for kind, one in masks.items()}
    return inputs | {"attention_mask": found if isinstance(mask, dict) else found[""]}


def _without(mask: Tensor, count: int, rows: Any) -> Tensor:
    """The mask float [B, 1, n, m] without the first `count` columns, but for the rows of these themselves."""
    hidden = (torch.arange(mask.shape[-1], device=mask.device) < count) & (rows >= count)[:, None, :, None]
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _at(states: Tensor, places: int | Tensor) -> Tensor:
    """[B, n, h] at the last places, or those int64 [m] or [B, m]."""
    if isinstance(places, int):
        return states[:, -places:]
    if places.dim() == 1:
        return states[:, places]
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
