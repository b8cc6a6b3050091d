"""Layouts of block drafters: how their tensors are called, and what their configs say.

    z-lab, DeepSpec, SpecForge, transformers    target_layer_ids name layers, whose outputs are read: HS[id + 1]
    speculators                                 aux_hidden_state_layer_ids: HS[id]
    without either    HS[round(1 + i (L - 4) / (n - 1)) + 1] for draft layers i of n, HS[L // 2 + 1] of one

with HS as of `draft_layouts`. Settings of z-lab and SpecForge may be in a part of the config,
dflash_config or dspark_config.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from treeopt.defaults import MAX_DEPTH
from treeopt.errors import Code, TreeoptError
from treeopt.models import draft_layouts as layouts
from treeopt.models.block_heads import MARKOV_KINDS, VANILLA
from treeopt.models.block_module import BlockWiring

PARTS = ("dflash_config", "dspark_config")  # of a config, with settings; the last decides
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")  # that speculators may have outside its layers
_BLOCK = 16  # rows of a block where the config does not say: of z-lab and SGLang
_AUX, _TARGETS = "aux_hidden_state_layer_ids", "target_layer_ids"
_TWIN = "encoder.output_norm_enc.weight"  # a tensor of transformers' own layout
# Heads of DSpark and Domino, and where they are in a module. Older files have them in `logit_head`.
_HEADS = {"markov_head": "", "confidence_head": "", "prefix_gru": "domino.", "embed_proj": "domino."}
_NAMES: layouts.Names = (
    *layouts.UNUSED,
    (r"layers\.", "decoder.layers."),
    (r"embed_tokens\.", "embeddings."),
    *((rf"{old}{one}\.", f"{at}{one}.") for old in ("", r"logit_head\.") for one, at in _HEADS.items()),
    *((rf"{name}\.", f"{name}.") for name in ("fc", "hidden_norm")),
    (r"encoder\.output_norm_enc\.", "hidden_norm."),  # of transformers
    (r"encoder\.fc\.", "fc."),
)
_ARCHITECTURES = (
    r"(.*DFlash2?|.*DSpark|Domino|JetSpec|MuseGlimmerAssistant)(Draft)?(Model|Speculator)|dflash2?|dspark|domino"
)
# Keys that change the forward, and the values at which they do not.
_PLAIN = {
    "final_logit_softcapping": (None, 0, 0.0),
    "output_multiplier": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "is_neox_style": (None, True),
    "attention_sink_bias": (None, False),
    "use_swa": (None, False),
    "projector_type": (None, "dflash", "dflash2", "domino", "causal_v5", "dspark"),
    "dspark_backbone_conv_enabled": (None, False),
}


def is_block(keys: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether a config names a block drafter, or tensors of these names are those of one."""
    known, named = set(keys), config.get("architectures")
    by_name = [*map(str, named if isinstance(named, list) else []), str(config.get(layouts.SPECULATORS, ""))]
    if any(re.fullmatch(_ARCHITECTURES, name) for name in by_name):
        return True
    return {"fc.weight", "hidden_norm.weight", "norm.weight"} <= known and "midlayer.hidden_norm.weight" not in known


def block_layout(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> layouts.ModuleLayout:
    """The layout of a block drafter; arguments as `eagle_layout`."""
    parts = (config.get(key) for key in PARTS)
    settings = {**config, **{key: one for part in parts if isinstance(part, Mapping) for key, one in part.items()}}
    for key, plain in _PLAIN.items():
        if settings.get(key) not in plain:
            raise layouts.unread(name, f"its {key} is {settings[key]!r}, which is not read")
    decoder = layouts.decoder_config(name, _typed(config, shapes), shapes, "qwen3")
    window, sliding = config.get("sliding_window"), layouts.SLIDING in (getattr(decoder, "layer_types", None) or ())
    if type(window) is int and window > 0 and sliding:
        # Qwen3's config has no window by default. In transformers' class of drafters a row as far as that is seen.
        decoder.sliding_window, decoder.use_sliding_window = window + (_TWIN in shapes), True
    head, width = shapes.get("lm_head.weight", ()), int(decoder.hidden_size)
    size = _number(name, settings, "block_size", _BLOCK, 2, MAX_DEPTH)
    from_root = _from_root(config, settings, size)
    wiring = BlockWiring(
        title=_title(config, settings, shapes, from_root),
        reads=_reads(name, config, settings, layers, decoder.num_hidden_layers),
        state_size=layouts.state_size(name, config, width),
        size=size,
        mask=_number(name, settings, "mask_token_id", None),
        **_causal(config, settings, sliding=sliding and _TWIN not in shapes),
        mask_embedding="mask_embedding" in shapes,
        from_root=from_root,
        **_parts(name, settings, width, int(decoder.vocab_size), shapes),
        vocabulary=head[0] if len(head) == 2 else 0,
        own_embeddings="embed_tokens.weight" in shapes,
    )
    return layouts.ModuleLayout(wiring, decoder, _NAMES)


def _typed(config: Mapping[str, Any], shapes: Iterable[str]) -> Mapping[str, Any]:
    """The config, of Qwen3's type where its layers are: speculators trains these layers whatever type it was given."""
    if _TWIN in shapes or re.fullmatch(_ARCHITECTURES, str(config.get("model_type"))):
        config = {**config, "model_type": "qwen3"}
    part = config.get("transformer_layer_config")
    if isinstance(part, Mapping):
        above = {key: config[key] for key in _WINDOWS if config.get(key) is not None}
        normed = part.get("model_type") == "llama" and "layers.0.self_attn.q_norm.weight" in shapes
        part = {**part, **above, **({"model_type": "qwen3"} if normed else {})}
        config = {**config, "transformer_layer_config": part}
    return config


def _causal(config: Mapping[str, Any], settings: Mapping[str, Any], *, sliding: bool) -> dict[str, Any]:
    """The fields of a wiring that say which layers are causal.

    By `is_causal`, or else `causal` or `causal_head`, all or none; without these keys the `sliding` ones, if there are
    any, unless speculators' `sliding_window_non_causal` is true, as it is by default in its DFlash2.
    """
    said = [settings[key] for key in ("is_causal", "causal", "causal_head") if isinstance(settings.get(key), bool)]
    if said:
        return {"causal": said[0] if isinstance(settings.get("is_causal"), bool) else any(said)}
    free = config.get("sliding_window_non_causal", config.get(layouts.SPECULATORS) == "dflash2")
    return {"causal_kinds": (layouts.SLIDING,) if sliding and free is not True else ()}


def _parts(
    name: str, settings: Mapping[str, Any], width: int, vocab_size: int, shapes: Iterable[str]
) -> dict[str, Any]:
    """The fields of a wiring that say what a block drafter has beside the layers of DFlash."""
    markov = settings.get("markov_head_type") or VANILLA
    if markov not in MARKOV_KINDS:
        raise layouts.unread(name, f"its markov_head_type is {markov!r}, not one of {', '.join(MARKOV_KINDS)}")
    found: dict[str, Any] = {"markov": markov, "markov_rank": _number(name, settings, "markov_rank", 0)}
    asked = any(settings.get(key) is True for key in ("enable_confidence_head", "use_confidence_head"))
    if asked and any("confidence_head." in key for key in shapes):
        of_token = settings.get("confidence_head_with_markov") is True
        found |= {"confidence": True, "confidence_of_token": of_token}
        if of_token and not found["markov_rank"]:
            raise layouts.unread(name, "its confidence head reads a Markov head, and it has none")
    if taps := _number(name, settings, "conv_kernel_size", 0):
        group = _number(name, settings, "conv_group_size", 1, 1)
        if width % group:
            raise layouts.unread(name, f"its conv_group_size is {group}, which does not divide its hidden size {width}")
        found |= {"taps": taps, "group": group}
    if rank := _number(name, settings, "selector_rank", 0):
        top_k = _number(name, settings, "selector_top_k", None, 1, vocab_size)
        found |= {"selector_rank": rank, "selector_top_k": top_k}
    if _is_domino(settings):
        sizes = [_number(name, settings, key, None, 1) for key in ("gru_hidden_dim", "emb_dim")]
        found["domino"] = (*sizes, _number(name, settings, "pure_draft_prefix_len", 0))
    return found


def _is_domino(settings: Mapping[str, Any]) -> bool:
    kind = settings.get("projector_type")  # decides, as speculators may write the sizes into any config
    return kind in ("domino", "causal_v5") if isinstance(kind, str) else "gru_hidden_dim" in settings


def _number(
    name: str, settings: Mapping[str, Any], key: str, default: int | None, least: int = 0, most: int = 1 << 20
) -> int:
    """A whole number of a config; without a default it must be there."""
    found = settings.get(key)
    found = default if found is None else found
    if type(found) is not int or not least <= found <= most:
        raise layouts.unread(name, f"its {key} is {found!r}, not a number from {least} to {most}")
    return found


def _from_root(config: Mapping[str, Any], settings: Mapping[str, Any], size: int) -> bool:
    """Whether the root's row predicts, by the config, or else by the drafts of a block of this size, or by its name."""
    said = [settings[key] for key in ("sample_from_anchor", "shift_label") if isinstance(settings.get(key), bool)]
    drafts = layouts.proposed(config.get("speculators_config"))
    if not said and drafts == size - 1:  # from the root on a block has one more
        return False
    names = f"{config.get('architectures')} {config.get(layouts.SPECULATORS, '')}".lower()
    return bool(said[0]) if said else "dspark" in names or settings.get("projector_type") == "dspark"


def _title(
    config: Mapping[str, Any], settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], from_root: bool
) -> str:
    """The kind of a block drafter and whose layout it has."""
    if _TWIN in shapes:
        return "DFlash (transformers)"
    marks = {
        "Domino": _is_domino(settings),
        "DSpark": from_root or "dspark" in str(config.get(layouts.SPECULATORS)),
        "JetSpec": settings.get("causal_head") is True,
        "DFlash2": bool(settings.get("selector_rank")),
    }
    kind = next((one for one, marked in marks.items() if marked), "DFlash")
    if layouts.SPECULATORS in config:
        return f"{kind} (speculators)"
    own = "DeepSpec" if "target_layer_ids" in config else "SpecForge"
    return f"{kind} ({own if kind == 'DSpark' else 'z-lab'})"


def _reads(name: str, config: Mapping[str, Any], settings: Mapping[str, Any], layers: int, own: int) -> tuple[int, ...]:
    """The states that a block drafter of `own` layers reads; see the module's docstring."""
    given, more = (config.get(_AUX), 0) if layouts.SPECULATORS in config else (settings.get(_TARGETS), 1)
    if given is None:
        given, more = [round(1 + i * (layers - 4) / (own - 1)) for i in range(own)] if own > 1 else [layers // 2], 1
    return layouts.states_of(name, given, more, layers)


def check_mask(name: str, wiring: Any, vocab_size: int) -> None:
    """Raise E213 where the mask is no token of the base."""
    if wiring.mask >= vocab_size and not getattr(wiring, "mask_embedding", False):
        why = f"its mask is token {wiring.mask}, and the base has {vocab_size}"
        raise TreeoptError(Code.DRAFT_MISMATCH, f"{name} was not made for this base: {why}")
