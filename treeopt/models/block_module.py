"""Block drafters, which write the tokens of all levels in one forward: DFlash and its kin.

A block is the root and mask tokens after it. Its layers attend to the block and to the states of the base at the tokens
before the root, projected once and read as they are by every layer:

    c = norm(fc([h_a; h_b; ...]))            at each token of the text
    K, V of layer i = W [c; norm(x)]         x the rows of the block
    logits of level j = lm_head(norm(x_j))   row 0 is the root and predicts nothing

with h_a, h_b states of the base (DFlash, arXiv:2602.06036; causal blocks: JetSpec, arXiv:2606.18394). DSpark's blocks
begin to predict with row 0. The layers are of a stock class of transformers; `block_heads` has what DSpark and DFlash2
add to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from treeopt.defaults import BLOCK
from treeopt.models import block_heads
from treeopt.models.base import CACHE
from treeopt.models.draft_module import StateModule, stock_decoder


@dataclass(frozen=True)
class BlockWiring:
    """What a block drafter computes; fields that `Wiring` has mean the same.

    Args:
        title: the layout of its checkpoint, for messages.
        reads: indices of the base's hidden states that it reads.
        state_size: width of one of these states.
        size: rows of a block, the root counted.
        mask: the token of the rows after the root.
        causal: whether a row attends to the rows of the block before it alone.
        causal_kinds: kinds of layers, by their names in `layer_types`, in which it does where it does not in all.
        mask_embedding: whether the rows after the root have an embedding of their own.
        from_root: whether the root's row predicts the first level, as in DSpark; else there is one level less.
        markov, markov_rank: the kind and rank of DSpark's Markov head; rank 0 where it has none.
        confidence, confidence_of_token: whether it has a confidence head, and whether this reads the token before.
        selector_rank, selector_top_k: of DFlash2's selector; 0 where it has none.
        domino: of Domino's head the sizes of its state and of its inner layer, and the levels without it; or empty.
        taps, group: of DFlash2's convolutions, rows and channels of a kernel; 0 taps where it has none.
        vocabulary, own_embeddings: as of `Wiring`.
    """

    title: str
    reads: tuple[int, ...]
    state_size: int
    size: int
    mask: int
    causal: bool = False
    causal_kinds: tuple[str, ...] = ()
    mask_embedding: bool = False
    from_root: bool = False
    markov: str = block_heads.VANILLA
    markov_rank: int = 0
    confidence: bool = False
    confidence_of_token: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    domino: tuple[int, ...] = ()
    taps: int = 0
    group: int = 1
    vocabulary: int = 0
    own_embeddings: bool = False

    kind, project = BLOCK, True

    @property
    def numbers(self) -> tuple[int, ...]:
        """What else decides the drafts, for the fingerprint."""
        return self.size, self.mask, self.selector_top_k, *self.domino, *([1] * len(self.causal_kinds))


class BlockModule(StateModule):
    """A block drafter; arguments as `StateModule`."""

    def __init__(
        self, config: PreTrainedConfig, wiring: BlockWiring, embeddings: nn.Module, lm_head: nn.Module, vocab_size: int
    ) -> None:
        super().__init__(config, wiring, embeddings, lm_head, vocab_size)
        self.decoder = stock_decoder(config)
        self.norm = self.decoder.norm
        self.decoder.norm = self.decoder.embed_tokens = nn.Identity()
        self.fc = nn.Linear(len(wiring.reads) * wiring.state_size, config.hidden_size, bias=False)
        self.hidden_norm = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        if wiring.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        sizes = vocab_size, wiring.vocabulary or vocab_size, config.hidden_size
        if wiring.markov_rank:
            self.markov_head = block_heads.MarkovHead(*sizes, wiring.markov_rank, wiring.markov)
        if wiring.selector_rank:
            self.candidate_selector = block_heads.CandidateSelector(*sizes, wiring.selector_rank, wiring.selector_top_k)
        if wiring.domino:
            self.domino = block_heads.DominoHead(*sizes[1:], *wiring.domino)
        if wiring.confidence:
            beside = wiring.markov_rank if wiring.confidence_of_token else 0
            self.confidence_head = block_heads.ConfidenceHead(config.hidden_size + beside)
        for layer in self.decoder.layers if wiring.taps else ():
            layer.attention_conv = block_heads.BlockConvolution(config.hidden_size, wiring.taps, wiring.group)
            layer.mlp_conv = block_heads.BlockConvolution(config.hidden_size, wiring.taps, wiring.group)
        self.post_init()

    @property
    def levels(self) -> int:
        """Tokens that a block drafts."""
        size: int = self.wiring.size
        return size if self.wiring.from_root else size - 1

    @property
    def token_head(self) -> block_heads.TokenHead | None:
        """The head by which a level's logits depend on the token above; None where they do not."""
        names = ("markov_head", "candidate_selector", "domino")
        return next((getattr(self, name) for name in names if hasattr(self, name)), None)

    def after(self, level: int, block: Tensor, rows: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, n, V_draft] of a level, from 0, after tokens int64 [B, n] of the level above, and path states.

        `block` float [B, levels, V_draft] and `rows` [B, levels, h] are of the forward; `state` as of `TokenHead`.
        """
        head, at = self.token_head, slice(level, level + 1)
        assert head is not None
        found: tuple[Tensor, Tensor] = head(level, block[:, at], rows[:, at], head.read(tokens, self.embedded), state)
        return found

    def confidence(self, row: Tensor, tokens: Tensor) -> Tensor:
        """The logit of the confidence head, float [B, n], at a level's row [B, 1, h] after tokens int64 [B, n]."""
        read = self.markov_head.markov_w1(tokens) if self.wiring.confidence_of_token else None
        found: Tensor = self.confidence_head(row, read)
        return found if read is not None else found.expand(-1, tokens.shape[1])

    def states(self, read: Tensor) -> Tensor:
        """What every layer reads at tokens of the text, of the base's states side by side: [..., n * d] -> [..., h]."""
        projected: Tensor = self.hidden_norm(self.fc(read.to(self.fc.weight.device, self.fc.weight.dtype)))
        return projected

    def forward(self, input_ids: Tensor, hidden: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits [B, levels, V_draft] of blocks and their rows [B, levels, h] after the norm.

        With `hidden` no logits: tokens of the text are cached.

        Args:
            input_ids: int64 [B, size], the root and any tokens; int64 [B, n] of the text with `hidden`.
            hidden: float [B, n, h], `states` of tokens of the text.
            inputs: mask, positions and cache, as of stock models; others are not read.
        """
        rows = self.embedded_rows(input_ids) if hidden is None else hidden
        angles = self.decoder.rotary_emb(rows, position_ids=inputs["position_ids"])
        cache, masks = {CACHE: inputs[CACHE]}, inputs["attention_mask"]
        for number, layer in enumerate(self.decoder.layers):
            mask = masks[self.config.layer_types[number]] if isinstance(masks, dict) else masks
            attend = partial(layer.self_attn, position_embeddings=angles, attention_mask=mask, **cache)
            if hidden is not None:
                attend(hidden_states=hidden)
                continue
            before, after = self._around(layer, "attention_conv", layer.input_layernorm(rows))
            rows = rows + after(attend(hidden_states=before)[0])
            before, after = self._around(layer, "mlp_conv", layer.post_attention_layernorm(rows))
            rows = rows + after(layer.mlp(before))
        if hidden is not None:
            logits = hidden.new_zeros(*hidden.shape[:2], 0)
            return CausalLMOutputWithPast(logits=logits, hidden_states=(hidden,), **cache)
        normed = self.norm(rows)[:, -self.levels :]
        return CausalLMOutputWithPast(logits=self.head(normed), hidden_states=(normed,), **cache)

    def _around(self, layer: nn.Module, name: str, normed: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What a part of a layer reads, of its normed input, and what becomes of its output."""
        if not self.wiring.taps:
            return normed, lambda rows: rows
        kernels = getattr(layer, name).kernels(normed)
        return block_heads.convolved(normed, kernels[0]), partial(block_heads.convolved, kernels=kernels[1])

    def embedded_rows(self, tokens: Tensor) -> Tensor:
        """The embeddings of a block: of the root, then of the mask."""
        ids = torch.cat([tokens[:, :1], torch.full_like(tokens[:, 1:], self.wiring.mask)], dim=1)
        if not self.wiring.mask_embedding:
            return self.embedded(ids)
        root = self.embedded(ids[:, :1])
        return torch.cat([root, self.mask_embedding.expand(len(ids), self.wiring.size - 1, -1)], dim=1)
