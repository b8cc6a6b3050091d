"""Parts of block drafters beside their layers: heads that read the token before, and DFlash2's convolutions.

With such a head the logits of a level depend on the token above it, p, and with a state s on those before p. With x
the row of the level after the norm and u its logits:

    DSpark, vanilla   u + W2 w,           w = W1[p]                                            arXiv:2607.05147
    DSpark, gated     u + W2 (g * w),     g = sigmoid(G [x; w])
    DSpark, rnn       u + W2 tanh(o),     [g; c; o] = J [s; w; x],  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    DFlash2           u + B (A[p] * P x)  for the likeliest tokens of u
    Domino            u + E silu(F [x; s]),  s = GRU(embedding of p, s)                         arXiv:2605.29707
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
MARKOV_KINDS = (VANILLA, GATED, RNN)


class TokenHead(nn.Module, ABC):
    """A head that reads the token before; `state_size` numbers of a path are handed on."""

    state_size = 0

    def read(self, tokens: Tensor, embeddings: Callable[[Tensor], Tensor]) -> Tensor:
        """What the head reads of tokens int64 [B, n] of the base, float [B, n, r]; here their embeddings."""
        read: Tensor = embeddings(tokens)
        return read

    @abstractmethod
    def forward(self, level: int, logits: Tensor, row: Tensor, read: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, n, V_draft] after each of some tokens of the level above, and the states of their paths.

        Args:
            level: from 0.
            logits: float [B, 1, V_draft], those of the level by the block alone.
            row: float [B, 1, h], the row of the level after the norm.
            read: float [B, n, r], of the tokens above.
            state: float [B, n, state_size], of the paths to the level above; zeros at the root.
        """


class MarkovHead(TokenHead):
    """DSpark's; `rank` numbers stand for a token."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, width: int, rank: int, kind: str) -> None:
        super().__init__()
        self.kind, self.state_size = kind, rank if kind == RNN else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == GATED:
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == RNN:
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def read(self, tokens: Tensor, embeddings: Callable[[Tensor], Tensor]) -> Tensor:
        read: Tensor = self.markov_w1(tokens)
        return read

    def forward(self, level: int, logits: Tensor, row: Tensor, read: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        token, row = read, row.expand(-1, read.shape[1], -1)
        if self.kind == GATED:
            token = torch.sigmoid(self.gate_proj(torch.cat([row, token], dim=-1))) * token
        if self.kind == RNN:
            gate, fresh, token = self.joint_proj(torch.cat([state, token, row], dim=-1)).chunk(3, dim=-1)
            state, token = torch.sigmoid(gate) * state + torch.sigmoid(-gate) * fresh.tanh(), token.tanh()
        return logits + self.markov_w2(token).to(logits.device), state


class CandidateSelector(TokenHead):
    """DFlash2's, which chooses among the `top_k` likeliest tokens; others keep their distance to the last of these."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, width: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = min(top_k, draft_vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def read(self, tokens: Tensor, embeddings: Callable[[Tensor], Tensor]) -> Tensor:
        return self.predecessor_codebook[tokens]

    def forward(self, level: int, logits: Tensor, row: Tensor, read: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        best = logits.topk(self.top_k, dim=-1)  # of [B, 1, K]
        edges = (read * self.hidden_projection(row)) @ self.successor_codebook[best.indices[:, 0]].transpose(1, 2)
        chosen = best.values + edges.to(logits.device)
        rest = logits + (chosen.amin(-1, keepdim=True) - best.values[..., -1:])
        return rest.scatter(-1, best.indices.expand(-1, read.shape[1], -1), chosen), state


class DominoHead(TokenHead):
    """Domino's, whose state is that of a GRU over the embeddings of a path; levels before `begin` read it not."""

    def __init__(self, draft_vocab_size: int, width: int, state: int, inner: int, begin: int) -> None:
        super().__init__()
        self.begin, self.state_size = begin, state
        self.prefix_gru = nn.GRU(width, state, bias=False, batch_first=True)
        first, last = nn.Linear(width + state, inner, bias=False), nn.Linear(inner, draft_vocab_size, bias=False)
        self.embed_proj = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, level: int, logits: Tensor, row: Tensor, read: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows, count = read.shape[:2]
        _, state = self.prefix_gru(read.reshape(rows * count, 1, -1), state.reshape(1, rows * count, -1))
        state = state.view(rows, count, -1)
        if level < self.begin:
            return logits.expand(-1, count, -1), state
        added = self.embed_proj(torch.cat([row.expand(-1, count, -1), state], dim=-1))
        return logits + added.to(logits.device), state


class ConfidenceHead(nn.Module):
    """DSpark's estimate whether the likeliest token of a level is right, from its row and, or not, the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, row: Tensor, token: Tensor | None) -> Tensor:
        """Its logit, float [B, n], of rows [B, 1, h] and what stands for the tokens [B, n, r], None where not read."""
        read = row if token is None else torch.cat([row.expand(-1, token.shape[1], -1), token], dim=-1)
        logit: Tensor = self.proj(read)
        return logit[..., 0]


def log_odds(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The log-odds float64 [..., 1] of the likeliest token of logits [..., V], and its index int64 [..., 1]."""
    top = logits.max(dim=-1, keepdim=True)
    chance = (top.values.float() - logits.float().logsumexp(-1, keepdim=True)).double().exp().clamp(max=1 - 1e-9)
    return chance.logit(), top.indices


def with_confidence(logits: Tensor, sure: Tensor, weights: Sequence[float]) -> Tensor:
    """Logits float32 [..., V] whose likeliest token has the log-odds of `Level.confidence`; the head's are `sure`."""
    own, index = log_odds(logits)
    constant, of_own, of_head = weights
    wanted = constant + of_own * own + of_head * sure.double()[..., None]
    return logits.float().scatter_add(-1, index, (wanted - own).float())


class BlockConvolution(nn.Module):
    """DFlash2's convolution over the rows of a block, before and after a part of a layer, by its normed input x:

    row i, channel c: sum over t of (base[side, t, c] + (K x_i)[side, t, group of c]) x[i - t, c]
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def kernels(self, normed: Tensor) -> Tensor:
        """float [2, taps, B, n, h] of rows [B, n, h]: those before the part, and those after it."""
        _, taps, _ = self.base_kernel.shape
        own = self.kernel_projection(normed).unflatten(-1, (2, taps, -1)).repeat_interleave(self.group, dim=-1)
        found: Tensor = own.movedim((2, 3), (0, 1)) + self.base_kernel[:, :, None, None]
        return found


def convolved(rows: Tensor, kernels: Tensor) -> Tensor:
    """Rows [B, n, h] by kernels [taps, B, n, h]; there is nothing before the first row."""
    found = kernels[0] * rows
    for tap, kernel in enumerate(kernels[1:].unbind(), start=1):
        found = found + kernel * torch.nn.functional.pad(rows, (0, 0, tap, 0))[:, : rows.shape[1]]
    return found
