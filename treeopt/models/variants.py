"""A drafter as it would be with another wiring: the same weights, read another way.

A file does not say how its drafter was wired when it was trained, and a drafter that is wired otherwise drafts all the
same, only worse. docs/doctor.md lists the faults, with their sources.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treeopt.models.base import Base
from treeopt.models.block_module import BlockModule
from treeopt.models.draft_module import WIDE, DraftModule, StateModule
from treeopt.models.heads import MedusaHeads

BEFORE_NORM = -1  # a state: the last one before the final norm
_WEIGHTS, _BUFFERS, _PARTS = _STORES = "_parameters", "_buffers", "_modules"  # where a module of torch keeps them

Draft = Base | MedusaHeads
Change = Callable[[str, nn.Module], nn.Module]  # a part of a module, with its name, as another one or itself


@dataclass(frozen=True)
class Variant:
    """A drafter with another wiring.

    Args:
        name: what differs from the drafter as it is loaded.
        draft: the drafter.
        reads: the base's hidden states that it is given, as of `Base.reading`, or `BEFORE_NORM`.
    """

    name: str
    draft: Draft
    reads: tuple[int, ...]


def variants_of(base: Base, draft: Draft) -> Iterator[Variant]:
    """All variants that a kind of drafter admits; none of a draft model."""
    last = int(base.model.config.get_text_config().num_hidden_layers)
    if isinstance(draft, MedusaHeads):
        yield from _of_heads(draft, last)
    elif isinstance(draft.model, StateModule):
        yield from _of_states(draft, last)
        yield from _of_weights(draft, base)
        made = _of_block if isinstance(draft.model, BlockModule) else _of_module
        yield from made(draft)


def _of_states(draft: Base, last: int) -> Iterator[Variant]:
    """Other states of the base, of which the last is number `last`."""
    reads: tuple[int, ...] = draft.model.wiring.reads
    for name, more in (("states of one layer above", 1), ("states of one layer below", -1)):
        moved = tuple(one + more for one in reads)
        if all(0 <= one <= last for one in moved):
            yield Variant(name, draft, moved)
    if last in reads:
        yield Variant("state before the final norm", draft, tuple(BEFORE_NORM if i == last else i for i in reads))
    if len(set(reads)) > 1:
        yield Variant("states in reversed order", draft, reads[::-1])


def _of_weights(draft: Base, base: Base) -> Iterator[Variant]:
    """Other readings of weights that all modules have."""
    model, reads = draft.model, draft.model.wiring.reads
    for more, name in ((1.0, "norms as 1 + w"), (-1.0, "norms as w, not 1 + w")):
        yield Variant(name, _with(draft, _norms(more)), reads)
    parts = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    rotated = {"k_proj", "rotary_emb"} <= parts  # not where keys are compressed, nor where positions are relative
    for inverse, name in ((False, "rotary embedding interleaved"), (True, "rotary embedding in halves"))[: 2 * rotated]:
        yield Variant(name, _with(draft, _rotary(model.config, inverse)), reads)
    tokens = model.token_map
    if tokens is not None and len(tokens) < model.base_vocab_size:
        own = torch.arange(len(tokens), device=tokens.device)
        for name, other in (("d2t as tokens, not distances", tokens - own), ("d2t as distances", tokens + own)):
            if int(other.min()) >= 0 and int(other.max()) < model.base_vocab_size:
                yield Variant(name, _set(draft, tokens=other), reads)
    if tokens is not None:
        head = nn.Linear(model.config.hidden_size, len(tokens), bias=False, device="meta")
        head.weight = nn.Parameter(base.lm_head.weight[tokens], requires_grad=False)
        if head.weight.shape[1] == model.config.hidden_size:
            yield Variant("LM head of the base", _set(draft, lm_head=head), reads)
    if model.wiring.own_embeddings and base.hidden_size == model.config.hidden_size:
        yield Variant("embeddings of the base", _set(draft, embeddings=base.model.get_input_embeddings()), reads)


def _of_module(draft: Base) -> Iterator[Variant]:
    """Of EAGLE heads and MTP layers."""
    wiring, reads = draft.model.wiring, draft.model.wiring.reads
    if wiring.wide:
        yield Variant("state before embedding", _with(draft, _halves), reads)
        normed = draft.model.decoder.layers[0].normed_residual
        name = "residual of the state" if normed else "residual of the normed state"
        yield Variant(name, _with(draft, _residual), reads)
    else:
        name = "embedding before state" if wiring.state_first else "state before embedding"
        yield Variant(name, _with(draft, _rewired(state_first=not wiring.state_first)), reads)
    if wiring.final_norm and not wiring.levels:
        name = "chained state before the norm" if wiring.chains_normed else "chained state after the norm"
        yield Variant(name, _with(draft, _rewired(chains_normed=not wiring.chains_normed)), reads)
    yield _toggled(draft, LaggedModule, DraftModule, "embedding of the state's own token", "of the token after")


def _of_block(draft: Base) -> Iterator[Variant]:
    """Of block drafters."""
    wiring, reads = draft.model.wiring, draft.model.wiring.reads
    yield _toggled(draft, MaskedRoot, BlockModule, "mask in the root's row", "root in its row")
    causal = wiring.causal or bool(wiring.causal_kinds)
    name = "rows that see the whole block" if causal else "rows that see the rows before"
    yield Variant(name, _wired(draft, causal=not causal, causal_kinds=()), reads)
    name = "first level by the row after the root" if wiring.from_root else "first level by the root's row"
    yield Variant(name, _wired(draft, from_root=not wiring.from_root), reads)
    if draft.model.token_head is not None or isinstance(draft.model, WithoutTokenHead):
        names = "without the head that reads the token above", "with the head that reads the token above"
        yield _toggled(draft, WithoutTokenHead, BlockModule, *names)


def _of_heads(heads: MedusaHeads, last: int) -> Iterator[Variant]:
    """Of Medusa heads; their order is found by `best_order`."""
    count = heads.num_heads
    yield Variant("state before the final norm", heads, (BEFORE_NORM,))
    yield Variant("state of one layer below", heads, (last - 1,))
    without = isinstance(heads, NoResidual)
    name = "heads with residual" if without else "heads without residual"
    yield Variant(name, as_heads(heads, MedusaHeads if without else NoResidual), (last,))
    if heads.lm_head is not None and heads.token_map is None:
        yield Variant("LM head of the base", as_heads(heads, type(heads), shared=True), (last,))
    if count > 1:
        below = [*range(1, count), count - 1]
        yield Variant("heads of one level below", as_heads(heads, type(heads), below), (last,))
        yield Variant("heads of one level above", as_heads(heads, type(heads), [0, *range(count - 1)]), (last,))


def as_heads(
    heads: MedusaHeads, kind: type[MedusaHeads], order: list[int] | None = None, *, shared: bool = False
) -> MedusaHeads:
    """The heads in another order, of another class, or with the base's LM head."""
    chosen = order or list(range(heads.num_heads))
    lm_head = None if shared or heads.lm_head is None else heads.lm_head[chosen]
    vocab = heads.mapped_vocab_size
    return kind.from_tensors(heads.weight[:, chosen], heads.bias[:, chosen], lm_head, heads.token_map, vocab)


class NoResidual(MedusaHeads):
    """Heads whose blocks are SiLU(W x + b), without x."""

    residual = False


class LaggedModule(DraftModule):
    """A module whose rows of the text read the embedding of the token that their state is of.

    The row of a token reads that of the token before; the first row of a text has none and reads its own.
    """

    def forward(self, input_ids: Tensor, hidden: Tensor | None = None, *args: Any, **inputs: Any) -> Any:
        if not inputs.get("level"):
            input_ids = torch.cat([input_ids[:, :1], input_ids[:, :-1]], dim=1)
        return super().forward(input_ids, hidden, *args, **inputs)


class MaskedRoot(BlockModule):
    """A block whose first row is the mask, too."""

    def embedded_rows(self, tokens: Tensor) -> Tensor:
        if self.wiring.mask_embedding:
            return self.mask_embedding.expand(len(tokens), self.wiring.size, -1)
        return super().embedded_rows(torch.full_like(tokens, self.wiring.mask))


class WithoutTokenHead(BlockModule):
    """A block whose levels do not depend on the token above."""

    @property
    def token_head(self) -> None:
        return None


def _set(draft: Base, **parts: Any) -> Base:
    """A draft whose module has other attributes; all else is shared."""
    model = _copied(draft.model)
    for name, part in parts.items():
        for store in _STORES:
            vars(model)[store].pop(name, None)
        store = _PARTS if isinstance(part, nn.Module) else _BUFFERS if isinstance(part, Tensor) else ""
        (vars(model)[store] if store else vars(model))[name] = part
    return Base(model, draft.tokenizer, draft.name)


def _wired(draft: Base, **changed: Any) -> Base:
    return _set(draft, wiring=dataclasses.replace(draft.model.wiring, **changed))


def _toggled(draft: Base, kind: type[StateModule], plain: type[StateModule], name: str, other: str) -> Variant:
    """A draft of a class whose wiring differs, or of the plain one where it is of that class."""
    is_one, made = isinstance(draft.model, kind), _set(draft)
    made.model.__class__ = plain if is_one else kind
    return Variant(other if is_one else name, made, draft.model.wiring.reads)


def _with(draft: Base, change: Change) -> Base:
    """A draft with changed parts."""
    model: Any = _changed(draft.model, change, "")
    return Base(model, draft.tokenizer, draft.name)


def _changed(module: nn.Module, change: Change, name: str) -> nn.Module:
    own = vars(module)[_PARTS]
    parts = {key: part and _changed(part, change, f"{name}.{key}") for key, part in own.items()}
    made = change(name, module)
    if made is module and all(parts[key] is own[key] for key in parts):
        return module
    made = _copied(module) if made is module else made
    vars(made)[_PARTS] = parts
    return made


def _copied(module: Any) -> Any:
    """A module with stores of its own; parameters, buffers and parts are shared."""
    made = copy.copy(module)
    for store in _STORES:
        vars(made)[store] = dict(vars(made)[store])
    return made


def _reweighted(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module whose parameters are changed."""
    made: nn.Module = _copied(module)
    for key, weight in vars(module)[_WEIGHTS].items():
        if weight is not None:
            vars(made)[_WEIGHTS][key] = nn.Parameter(change(weight.detach()), requires_grad=False)
    return made


def _norms(more: float) -> Change:
    """All norms with so much more weight."""
    return lambda _, part: _reweighted(part, lambda w: w + more) if "Norm" in type(part).__name__ else part


def _rewired(**changed: Any) -> Change:
    """All layers of a draft module with another wiring."""

    def change(_: str, part: nn.Module) -> nn.Module:
        if not isinstance(part, DraftModule):
            return part
        made: DraftModule = _copied(part)
        made.wiring = dataclasses.replace(part.wiring, **changed)
        return made

    return change


def _rotary(config: Any, inverse: bool) -> Change:
    """Queries and keys whose rotated pairs are neighbours in the file, or the inverse: halves read as neighbours.

    Of each head the first numbers are rotated, all or a part of them; gates follow them.
    """
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    parameters = getattr(config, "rope_parameters", None) or {}
    part = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    order = torch.arange(int(size * part)).view(-1, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
    order = order.argsort() if inverse else order
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads, "q_norm": 1, "k_norm": 1}

    def change(name: str, module: nn.Module) -> nn.Module:
        count = heads.get(name.rpartition(".")[2])
        if count is None:
            return module

        def permuted(weight: Tensor) -> Tensor:
            rows = weight.reshape(count, -1, *weight.shape[1:]).clone()
            rows[:, : len(order)] = rows[:, order.to(weight.device)]
            return rows.reshape(weight.shape)

        return _reweighted(module, permuted)

    return change


def _halves(name: str, part: nn.Module) -> nn.Module:
    """Matrices of EAGLE-3's first layer that read state and embedding in the other order."""
    if name.rpartition(".")[2] not in WIDE or ".layers.0." not in name:
        return part
    return _reweighted(part, lambda w: torch.cat(w.chunk(2, dim=-1)[::-1], dim=-1) if w.dim() > 1 else w)


def _residual(_: str, part: nn.Module) -> nn.Module:
    """EAGLE-3's first layer with the other residual."""
    if not hasattr(part, "normed_residual"):
        return part
    made = _copied(part)
    made.normed_residual = not made.normed_residual
    found: nn.Module = made
    return found
