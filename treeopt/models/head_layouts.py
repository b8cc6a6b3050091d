"""The layouts of heads checkpoints: the names of the tensors in the files of each program that writes or reads heads.

    layout    block l of head h                        LM head of head h
    medusa    {h}.{l}.linear.{weight,bias}             {h}.{L}.weight
    full      medusa_head.{h}.{l}.linear...            medusa_head.{h}.{L}.weight        beside the backbone
    modelopt  medusa_heads.{h}.{l}.linear...           medusa_heads.{h}.{L}.weight       beside the backbone
    vllm      blocks.{h}.layers.{l}.{weight,bias}      lm_heads.{h}.weight, or lm_head.weight for all heads
    nxdi      medusa_head_{h}.{l}.linear...            medusa_head_{h}.{L}.weight

Heads and blocks count from 0, and L is the number of blocks. Block weights are [d, d], biases [d], LM heads [V, d]. TGI
reads `medusa`. A layout is recognised by its names, because published configs are wrong about heads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from treeopt.errors import Code, TreeoptError

_DIGITS = "([0-9]{1,9})"
_SHOWN = 6  # keys shown in an error


@dataclass(frozen=True)
class HeadsLayout:
    """The names of the tensors of heads.

    Args:
        name: of the layout.
        title: what users know it as.
        block: template of the name of a block's tensor, with {h}, {l} and {part}.
        lm_head: template of the name of an LM head, with {h} and, where it is counted like a block, {blocks}.
        prefix: of every name; the other tensors of a checkpoint with this prefix are those of its base model.
        other: names that belong to the layout and are neither blocks nor LM heads.
    """

    name: str
    title: str
    block: str
    lm_head: str
    prefix: str = ""
    other: tuple[str, ...] = ()

    @functools.cached_property
    def block_pattern(self) -> re.Pattern[str]:
        """Groups: head, block, weight or bias."""
        return _pattern(self.block)

    @functools.cached_property
    def lm_head_pattern(self) -> re.Pattern[str]:
        """Groups: head and, where the template has one, the number of blocks."""
        return _pattern(self.lm_head)

    def fits(self, key: str) -> bool:
        """Whether a tensor of this name belongs to the heads."""
        return bool(self.block_pattern.fullmatch(key) or self.lm_head_pattern.fullmatch(key)) or key in self.other


def _pattern(template: str) -> re.Pattern[str]:
    parts = {"h": _DIGITS, "l": _DIGITS, "blocks": _DIGITS, "part": "(weight|bias)"}
    pieces = re.split(r"\{(\w+)\}", template)
    return re.compile("".join(parts[piece] if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)))


_SEQUENTIAL = "{h}.{l}.linear.{part}", "{h}.{blocks}.weight"
_VLLM_OTHER = ("lm_head.weight", "token_map")


def _prefixed(name: str, title: str, prefix: str) -> HeadsLayout:
    return HeadsLayout(name, title, prefix + _SEQUENTIAL[0], prefix + _SEQUENTIAL[1], prefix)


MEDUSA = HeadsLayout("medusa", "Medusa", *_SEQUENTIAL)
FULL = _prefixed("full", "Medusa v1.0, with its base model", "medusa_head.")
MODELOPT = _prefixed("modelopt", "ModelOpt, with its base model", "medusa_heads.")
VLLM = HeadsLayout("vllm", "vLLM", "blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight", other=_VLLM_OTHER)
VLLM_PREFIXED = HeadsLayout(
    "vllm",
    "vLLM",
    f"medusa_heads.{VLLM.block}",
    f"medusa_heads.{VLLM.lm_head}",
    "medusa_heads.",
    tuple(f"medusa_heads.{key}" for key in _VLLM_OTHER),
)
NXDI = HeadsLayout(
    "nxdi", "AWS NxD Inference", "medusa_head_{h}.{l}.linear.{part}", "medusa_head_{h}.{blocks}.weight", "medusa_head_"
)
LAYOUTS = (MEDUSA, NXDI, FULL, VLLM_PREFIXED, MODELOPT, VLLM)

# Names in drafters of other kinds, the first that fits: what they are, and what to do.
NOT_YET = "treeopt cannot read these yet: name Medusa heads, or draft without heads (--drafter ngram)"
_FOREIGN = (
    (r"medusa_heads\.\d+\.(medusa_layers|lm_head)\.", "a checkpoint of TensorRT-LLM", "use the original heads"),
    (r"hydra_(mlp|lm_head)\.", "Hydra heads, which depend on the drafted tokens too", NOT_YET),
    (
        r"(.*\.)?(mtp(_layers)?|eh_proj|enorm|hnorm|shared_head|pre_projection)\.",
        "an MTP module, alone or in its base model",
        NOT_YET,
    ),
    (r"(logit_head\.)?(markov_head|confidence_head)\.", "a DSpark block drafter", NOT_YET),
    (r"prefix_gru\.", "a Domino block drafter", NOT_YET),
    (r"mask_hidden$", "a P-EAGLE block drafter", NOT_YET),
    (r"(hidden_norm|encoder\.output_norm_enc)\.", "a DFlash block drafter", NOT_YET),
    (r"(midlayer|layers\.0\.hidden_norm)\.", "an EAGLE-3 draft model", NOT_YET),
    (r"(fusion_)?fc\.", "an EAGLE draft model", NOT_YET),
    (r"(model|transformer|gpt_neox)\.", "a base model without Medusa heads", "name the folder of the heads"),
    (r"layers\.0\.", "perhaps an EAGLE draft model", NOT_YET),
)


def detect(keys: Iterable[str], name: str) -> HeadsLayout:
    """The layout of a checkpoint, by the names of its tensors."""
    known = sorted(keys)
    for layout in LAYOUTS:
        if any(layout.block_pattern.fullmatch(key) or layout.lm_head_pattern.fullmatch(key) for key in known):
            return layout
    for pattern, kind, fix in _FOREIGN:
        if any(re.match(pattern, key) for key in known):
            raise TreeoptError(Code.HEADS_INVALID, f"{name} is {kind}", fix=fix)
    raise invalid(name, f"has keys of another layout: {listed(known) or 'no tensors'}")


def expected_keys(
    num_heads: int, blocks: int, has_lm_head: bool, layout: HeadsLayout = MEDUSA
) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """The layout's keys: block weights [blocks][H], block biases [blocks][H], LM heads [H]."""
    heads = range(num_heads)
    weights, biases = (
        [[layout.block.format(h=h, l=block, part=part) for h in heads] for block in range(blocks)]
        for part in ("weight", "bias")
    )
    return weights, biases, [layout.lm_head.format(h=h, blocks=blocks) for h in heads] if has_lm_head else []


def listed(keys: Iterable[str]) -> str:
    """The first names, for a message."""
    return ", ".join(sorted(keys)[:_SHOWN])


def invalid(name: str, what: str) -> TreeoptError:
    """E211: a heads checkpoint that breaks a rule of its layout."""
    return TreeoptError(Code.HEADS_INVALID, f"{name} {what}", fix="see the layouts of heads in docs/engines.md")
