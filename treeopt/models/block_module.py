"""Block drafters, which write the tokens of all levels in one forward: DFlash and its causal kin.

A block is the root and mask tokens after it. Its layers attend to the block and to the states of the base at the tokens
before the root, projected once and read as they are by every layer:

    c = norm(fc([h_a; h_b; ...]))            at each token of the text
    K, V of layer i = W [c; norm(x)]         x the rows of the block
    logits of level j = lm_head(norm(x_j))   row 0 is the root and predicts nothing

with h_a, h_b states of the base (DFlash, arXiv:2602.06036; causal blocks: JetSpec, arXiv:2606.18394). The layers are of
a stock class of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from treeopt.defaults import BLOCK, MAX_DEPTH
from treeopt.models.draft_module import StateModule, stock_decoder


@dataclass(frozen=True)
class BlockWiring:
    """What a block drafter computes; fields that `Wiring` has mean the same.

    Args:
        title: the layout of its checkpoint, for messages.
        reads: indices of the base's hidden states that it reads.
        state_size: width of one of these states.
        size: rows of a block, the root counted: one more than its levels.
        mask: the token of the rows after the root.
        causal: whether a row attends to the rows of the block before it alone.
        mask_embedding: whether the rows after the root have an embedding of their own.
        vocabulary, own_embeddings: as of `Wiring`.
    """

    title: str
    reads: tuple[int, ...]
    state_size: int
    size: int
    mask: int
    causal: bool = False
    mask_embedding: bool = False
    vocabulary: int = 0
    own_embeddings: bool = False

    kind, project = BLOCK, True

    @property
    def numbers(self) -> tuple[int, ...]:
        """What else decides the drafts, for the fingerprint."""
        return self.size, self.mask


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
        self.post_init()

    @property
    def levels(self) -> int:
        """Tokens that a block drafts."""
        size: int = self.wiring.size
        return size - 1

    def states(self, read: Tensor) -> Tensor:
        """What every layer reads at tokens of the text, of the base's states side by side: [..., n * d] -> [..., h]."""
        projected: Tensor = self.hidden_norm(self.fc(read.to(self.fc.weight.device, self.fc.weight.dtype)))
        return projected

    def forward(self, input_ids: Tensor, hidden: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits [B, levels, V_draft] of blocks, or with `hidden` none, as tokens of the text are cached.

        Args:
            input_ids: int64 [B, size], the root and any tokens; int64 [B, n] of the text with `hidden`.
            hidden: float [B, n, h], `states` of tokens of the text.
            inputs: mask, positions and cache, as of stock models; others are not read.
        """
        rows = self._rows(input_ids) if hidden is None else hidden
        angles = self.decoder.rotary_emb(rows, position_ids=inputs["position_ids"])
        cache, masks = inputs["past_key_values"], inputs["attention_mask"]
        for number, layer in enumerate(self.decoder.layers):
            mask = masks[self.config.layer_types[number]] if isinstance(masks, dict) else masks
            read = layer.input_layernorm(rows) if hidden is None else hidden
            attended = layer.self_attn(
                hidden_states=read, position_embeddings=angles, attention_mask=mask, past_key_values=cache
            )[0]
            if hidden is None:
                rows = rows + attended
                rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        if hidden is not None:
            logits = hidden.new_zeros(*hidden.shape[:2], 0)
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache, hidden_states=(hidden,))
        after = self.norm(rows)
        return CausalLMOutputWithPast(logits=self.head(after[:, 1:]), past_key_values=cache, hidden_states=(after,))

    def _rows(self, tokens: Tensor) -> Tensor:
        """The embeddings of a block: of the root, then of the mask."""
        ids = torch.cat([tokens[:, :1], torch.full_like(tokens[:, 1:], self.wiring.mask)], dim=1)
        if not self.wiring.mask_embedding:
            embedded: Tensor = self.get_input_embeddings()(ids)
            return embedded
        root = self.get_input_embeddings()(ids[:, :1])
        return torch.cat([root, self.mask_embedding.expand(len(ids), self.levels, -1)], dim=1)


def most_levels(model: nn.Module) -> int:
    """The largest number of levels that a draft can have: of a block drafter those of its block."""
    return model.levels if isinstance(model, BlockModule) else MAX_DEPTH
