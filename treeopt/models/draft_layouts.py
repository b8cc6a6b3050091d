"""Layouts of EAGLE heads and MTP layers: how their tensors are called, and what their configs say.

docs/develop/formats.md lists the layouts with their sources. They differ in which states of the base an index names:
`HS[i]` is the input of layer i, and the states after the final norm where i is the number of layers.

    SpecForge, SGLang    eagle_config.eagle_aux_hidden_state_layer_ids name layers, whose outputs are read: HS[id + 1]
    AngelSlim            aux_hidden_states_layer_ids: HS[id + 1]
    speculators, vLLM    eagle_aux_hidden_state_layer_ids: HS[id]
    without these        HS[2], HS[L // 2], HS[L - 3]
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from treeopt.defaults import BLOCK, EAGLE, MAX_DEPTH, MTP
from treeopt.errors import Code, TreeoptError
from treeopt.models.checkpoint import plain_reason
from treeopt.models.draft_module import Wiring

Names = tuple[tuple[str, str], ...]  # patterns of tensors of a checkpoint, and what replaces them in a `DraftModule`
DROPPED = ""  # replaces a tensor that is not read

SLIDING = "sliding_attention"
SPECULATORS = "speculators_model_type"  # key of a config of speculators
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")
_ONE_ROPE = ("llama", "qwen2", "qwen3")  # models whose layers have one rotation, of all dimensions
_AUX = "eagle_aux_hidden_state_layer_ids"
# `verifier_*` are copies of the base's, which older versions of speculators store.
UNUSED: Names = ((r".*rotary_emb\.inv_freq", DROPPED), (r"(d2t|t2d)", DROPPED), (r"verifier_(lm_head|norm)\.", DROPPED))
_EAGLE: Names = (
    *UNUSED,
    (r"midlayer\.", "decoder.layers.0."),
    (r"layers\.", "decoder.layers."),
    (r"transformer\.", "decoder.layers.0."),
    (r"embed_tokens\.", "embeddings."),
    (r"fc_norm\.", "state_norms."),
    (r"input_norm\.", "joint_norm."),
    *((rf"{name}\.", f"{name}.") for name in ("fc", "norm")),
    (r"fusion_fc\.", "fc."),
    (r"pre_lm_head_layernorm\.", "norm."),
    (r"embedding_layernorm\.", "embedding_norm."),
)
LM_HEADS = ("shared_head.head.weight", "transformer.shared_head.output.weight", "lm_head.weight")  # of an MTP layer
_SHARED = r"((transformer\.)?shared_head\.(head|output)|embed_tokens|lm_head)\..*"  # where they are the base's
_CHAIN_NORM = "chain_norm"
_PARTS = ("embedding_norm.", "state_norm.", "fc.", "norm.")
# What the layouts of MTP layers call these parts: Qwen's and Mellum's, DeepSeek's and GLM's, Step's, Hunyuan's and
# Ling's, MiMo's and speculators', Inkling's, whose last norm is one for all layers.
_STYLES: tuple[tuple[str, ...], ...] = (
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
    ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ("embed_norm", "hidden_norm", "input_proj", _CHAIN_NORM),
)
_BASE = r"(model\.)?(language_model\.)?(model\.)?"  # prefixes of a base's own tensors

# Drafters of other kinds, by the names of tensors or an architecture: what they are.
OTHERS = (
    (r"mtp\.\d+\.markov_head\..*|dspark_.*", "DSpark in the layout of DeepSeek-V4"),
    (r"hydra_(mlp|lm_head)\..*", "Hydra heads"),
    (r"Gemma4Assistant.*", "an assistant of Gemma 4, which reads its base's cache"),
)
# Models whose MTP layers are of the first layer's kind, in vLLM's classes.
_AS_FIRST = {"layer_types": "exaone4", "mlp_layer_types": "exaone_moe"}
# MTP layers that are not read, by the types of their models.
_UNREAD_MTP = {"inkling2": "Inkling 2", "mimo_v2": "MiMo-V2"}


@dataclass(frozen=True)
class ModuleLayout:
    """A checkpoint of a draft module: what it computes, its decoder layers, and the names of its tensors."""

    wiring: Any  # `Wiring` or `BlockWiring`
    config: PreTrainedConfig
    names: Names

    def renamed(self, key: str) -> str:
        """The name of a checkpoint's tensor in a `DraftModule`; `DROPPED` where it is not read."""
        return renamed(key, self.names)

    def original(self, key: str, known: Mapping[str, str]) -> str:
        """The checkpoint's name of a tensor that it lacks, by those it has: `known` has their names by renamed ones."""
        for _, prefix in self.names:
            beside = next((made for made in known if prefix and made.startswith(prefix)), None)
            if beside is not None and key.startswith(prefix):
                return known[beside].removesuffix(beside.removeprefix(prefix)) + key.removeprefix(prefix)
        plain = ((pattern.replace("\\", ""), prefix) for pattern, prefix in self.names if prefix != DROPPED)
        return next((one + key.removeprefix(prefix) for one, prefix in plain if key.startswith(prefix)), key)


def renamed(key: str, names: Names) -> str:
    """A name with the first pattern that fits replaced; itself where none fits."""
    for pattern, name in names:
        found = re.match(pattern, key)
        if found:
            return DROPPED if name == DROPPED else name + key[found.end() :]
    return key


def other_kind(keys: Iterable[str], config: Mapping[str, Any]) -> str:
    """What a drafter is that treeopt does not read; empty for others."""
    named = config.get("architectures")
    said = [*map(str, named if isinstance(named, list) else []), str(config.get(SPECULATORS, "")), *keys]
    return next((kind for pattern, kind in OTHERS if any(re.fullmatch(pattern, name) for name in said)), "")


def is_eagle(keys: Iterable[str]) -> bool:
    """Whether tensors of these names are those of an EAGLE head."""
    marks = "fc.weight", "fusion_fc.weight", "layers.0.hidden_norm.weight"
    return any(key in marks or key.startswith("midlayer.") for key in keys)


def eagle_layout(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> ModuleLayout:
    """The layout of an EAGLE head from its config and the shapes of its tensors; the base has so many `layers`."""
    by_speculators, inner = SPECULATORS in config, config.get("eagle_config")
    config = {**(inner if isinstance(inner, Mapping) else {}), **config}
    decoder = decoder_config(name, config if by_speculators else _as_llama(config, shapes), shapes)
    width = int(decoder.hidden_size)
    first = "midlayer" if "midlayer.self_attn.q_proj.weight" in shapes else "layers.0"
    query = shapes.get(f"{first}.self_attn.q_proj.weight", ())
    wide = len(query) == 2 and query[1] == 2 * width
    head = shapes.get("lm_head.weight", ())
    # Without auxiliary states an EAGLE-3 head reads the last one as it is; engines do not read an fc of such a file.
    last = wide and not is_parallel(shapes, config) and config.get("use_aux_hidden_state") is False
    project = wide and (not last or state_size(name, config, width) != width)
    state_norms = project and ("fc_norm.0.weight" in shapes or config.get("fc_norm") is True)
    joint_norm = project and ("input_norm.weight" in shapes or config.get("norm_before_fc") is True)
    part = config.get("draft_vocab_size")
    part = part if isinstance(part, int) and part != decoder.vocab_size else 0
    title = ("EAGLE-3.1" if state_norms else "EAGLE-3") if wide else "EAGLE"
    wiring = Wiring(
        kind=EAGLE,
        title=f"{title} ({'speculators' if by_speculators else 'SpecForge' if wide else 'SafeAILab'})",
        reads=_reads(name, config, layers, by_speculators) if wide and not last else (layers,),
        state_size=state_size(name, config, width),
        wide=wide,
        project=project,
        bias="fc.bias" in shapes or "fusion_fc.bias" in shapes,
        norms="embedding_layernorm.weight" in shapes,
        state_norms=state_norms,
        joint_norm=joint_norm,
        normed_residual=config.get("norm_before_residual") is True,
        first_norm=wide or any(f"{one}.input_layernorm.weight" in shapes for one in (first, "transformer")),
        final_norm=wide or not {"norm.weight", "pre_lm_head_layernorm.weight"}.isdisjoint(shapes),
        # SpecForge's trainer has norm_output for EAGLE-3, too, where it means another thing.
        chains_normed=(state_norms or joint_norm or by_speculators) and config.get("norm_output") is True,
        vocabulary=head[0] if len(head) == 2 else (part if wide else 0),
        own_embeddings="embed_tokens.weight" in shapes,
    )
    if is_parallel(shapes, config):
        mask, levels = _masks(name, config)
        title = f"P-EAGLE ({'speculators' if by_speculators else 'SpecForge'})"
        wiring = dataclasses.replace(wiring, kind=BLOCK, title=title, mask=mask, levels=levels)
    return ModuleLayout(wiring, decoder, _EAGLE if project or not wide else ((r"(fusion_)?fc\.", DROPPED), *_EAGLE))


def _as_llama(config: Mapping[str, Any], shapes: Iterable[str]) -> dict[str, Any]:
    """A config of EAGLE's or SpecForge's, whose classes compute as Llama for a base of any type.

    Biases are those of the tensors: where only queries, keys and values have them, the class is Qwen2's.
    """
    keys = " ".join(shapes)
    if re.search(r"self_attn\.(q_norm|kv_a_proj)", keys):  # of another class
        return dict(config)
    query, out = (f"self_attn.{part}_proj.bias" in keys for part in "qo")
    kept = {key: one for key, one in config.items() if key not in ("layer_types", "partial_rotary_factor", *_WINDOWS)}
    if config.get("model_type") == "llama4_text" and "intermediate_size_mlp" in config:  # of its dense layers
        kept["intermediate_size"] = config["intermediate_size_mlp"]
    return kept | {"model_type": "qwen2" if query and not out else "llama", "attention_bias": out}


def is_parallel(keys: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether tensors or a config are those of P-EAGLE."""
    named = config.get("architectures")
    said = [*map(str, named if isinstance(named, list) else []), str(config.get(SPECULATORS))]
    return "mask_hidden" in keys or any(re.fullmatch(r"PEagle.*|p_?eagle", name) for name in said)


def _masks(name: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """The mask of P-EAGLE and the levels that it drafts; vLLM calls the mask `ptd_token_id` or `pard_token`."""
    masks = [config[key] for key in ("mask_token_id", "ptd_token_id", "pard_token") if config.get(key) is not None]
    mask = masks[0] if masks else None
    # Names and default of speculators, which now has the number among its settings of decoding.
    levels = config.get("num_depths", config.get("para_depths", proposed(config.get("speculators_config")) or 8))
    if type(mask) is not int or mask < 0 or type(levels) is not int or not 1 <= levels <= MAX_DEPTH:
        raise unread(name, f"its mask_token_id is {mask!r} and its num_depths {levels!r}")
    return mask, levels


def proposed(settings: Any) -> Any:
    """The number of drafts in settings of speculators."""
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    found = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return found if type(found) is int and 1 <= found <= MAX_DEPTH else None


def state_size(name: str, config: Mapping[str, Any], width: int) -> int:
    """The width of the base's states by a config, of which the module has that of its own."""
    found = config.get("target_hidden_size") or width
    if type(found) is not int or found < 1:
        raise unread(name, f"its target_hidden_size is {found!r}, not a number")
    return found


def _reads(name: str, config: Mapping[str, Any], layers: int, by_speculators: bool) -> tuple[int, ...]:
    """The states that an EAGLE-3 head reads; see the module's docstring."""
    part = config.get("eagle_config")
    of_sglang = part.get(_AUX) if isinstance(part, Mapping) and not by_speculators else None
    listed = (of_sglang, 1), (config.get(_AUX), 0), (config.get("aux_hidden_states_layer_ids"), 1)
    default = (2, layers // 2, layers - 3), 0
    given, more = next(((one, more) for one, more in listed if one not in (None, [])), default)
    return states_of(name, given, more, layers)


def states_of(name: str, given: Any, more: int, layers: int) -> tuple[int, ...]:
    """The states that a list of a config names, each number so many `more`; the base has so many `layers`."""
    if not isinstance(given, (list, tuple)) or not given or not all(type(one) is int for one in given):
        raise unread(name, f"{given!r} is not a list of the layers that it reads")
    reads = tuple(one + more for one in given)
    if not all(0 <= one <= layers for one in reads):
        why = f"it reads the states {list(reads)}, and the base has {layers} layers"
        raise TreeoptError(Code.DRAFT_MISMATCH, f"{name} was not made for this base: {why}")
    return reads


def mtp_tensors(keys: Iterable[str], config: PreTrainedConfig, number: int = 0) -> dict[str, str]:
    """The tensors of an MTP layer among a base's: their names there, by their names without the prefix of the layer.

    DeepSeek's and GLM's layers follow those of the model by number, others are called `mtp` or `mtp_layers`. Qwen's
    share projection and norms: all but the decoder layer, which is called `layers.0`.
    """
    after = config.get_text_config().num_hidden_layers + number
    prefixes = (rf"layers\.{after}\.", rf"mtp_layers\.{number}\.", rf"mtp\.layers\.{number}\.", r"mtp\.")
    known = list(keys)
    for prefix in prefixes:
        found = ((re.match(_BASE + prefix, key), key) for key in known)
        tensors = {key[match.end() :]: key for match, key in found if match}
        if _style(tensors):
            own = rf"layers\.{number}\."
            if number and prefix == prefixes[-1] and not any(re.match(own, key) for key in tensors):
                return {}
            named = ((re.sub(rf"^{own}", "layers.0.", key), key, full) for key, full in tensors.items())
            layer = {name: full for name, key, full in named if not key.startswith("layers.") or re.match(own, key)}
            chained = getattr(config.get_text_config(decoder=True), "chain_hidden_post_norm", False)
            norm = (re.fullmatch(rf"{_BASE}mtp\.({_CHAIN_NORM}\.weight)", key) for key in known if chained)
            return layer | {str(match[4]): match[0] for match in norm if match}
    return {}


def _style(keys: Iterable[str]) -> tuple[str, ...]:
    """What the parts of an MTP layer are called, by its tensors; empty where there are none but the last norm."""
    known = list(keys)
    found = {style: sum(key.startswith(f"{own}.") for own in style[:3] for key in known) for style in _STYLES}
    ends = {style: any(key.startswith(f"{style[-1]}.") for key in known) for style in _STYLES}
    return max(found, key=lambda style: (found[style], ends[style])) if any(found.values()) else ()


def unread_mtp(config: PreTrainedConfig) -> str:
    """The family of a base whose MTP layers are recognised and not read; empty for others."""
    kind = config.get_text_config(decoder=True).model_type
    return next((name for start, name in _UNREAD_MTP.items() if kind.startswith(start)), "")


def mtp_layers(config: PreTrainedConfig) -> int:
    """The number of MTP layers that a base's config says."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    text = config.get_text_config(decoder=True)
    found = [getattr(text, key, None) or 0 for key in keys]
    if not all(type(one) is int for one in found):
        raise unread("the MTP layer", f"the number of such layers in the base's config is {found}")
    return max(found)


def mtp_layout(
    tensors: Mapping[str, str],
    base: PreTrainedConfig,
    width: int,
    given: Mapping[str, Any] | None = None,
    number: int = 0,
    lm_head: tuple[str, int] = ("", 0),
) -> ModuleLayout:
    """The layout of an MTP layer by its tensors, as of `mtp_tensors`; `given` is a config of its own.

    `number` is that of the layer, from 0, among several; `lm_head` the name and the rows of one of its own.
    """
    style = _style(tensors)
    reversed_ = "token_layernorm" in style and given is None  # MiMo; speculators have the embedding first
    prefix = next(full.removesuffix(key) for key, full in tensors.items() if not key.startswith("layers."))
    layer = f"{prefix}layers.{number}." if "fc" in style else prefix
    parts = [(f"{prefix}{own}.", part) for own, part in zip(style, _PARTS, strict=True)]
    if _CHAIN_NORM in style:
        parts[-1] = (f"{prefix.split('layers.')[0]}{_CHAIN_NORM}.", _PARTS[-1])
        layer = f"{prefix}transformer_block."
    parts.append((layer, "decoder.layers.0."))
    own_head = [(re.escape(lm_head[0]), "lm_head.weight")] if lm_head[0] else []
    shared = re.escape(prefix) + _SHARED, DROPPED
    names = (*own_head, shared, *((re.escape(own), part) for own, part in parts))
    first = base.get_text_config(decoder=True)
    wiring = Wiring(
        kind=MTP,
        title=f"MTP ({'speculators' if given is not None else first.model_type})",
        reads=(int(first.num_hidden_layers),),
        state_size=width,
        state_first=reversed_ or bool(getattr(first, "mtp_hidden_states_first", False)),
        norms=True,
        final_norm=bool(getattr(first, "chain_hidden_post_norm", True)),
        chains_normed=True,
        vocabulary=lm_head[1],
    )
    return ModuleLayout(wiring, _mtp_config(first, number), (*UNUSED, *names))


def _mtp_config(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    """The config of one decoder layer after those of a model: full attention, and experts where the model has them."""
    made = type(config).from_dict(config.to_dict())
    for own, key in (("mtp_layer_types", "layer_types"), ("mtp_mlp_layer_types", "mlp_layer_types")):
        kinds = getattr(config, key, None)
        if kinds:
            last = "full_attention" if key == "layer_types" else kinds[-1]
            if config.model_type == _AS_FIRST.get(key):
                last = kinds[0]
            named = list(getattr(config, own, None) or [])
            setattr(made, key, named[number : number + 1] or [last])
    made.num_hidden_layers = 1
    made.per_layer_config = None  # its numbers are those of the base's layers
    if hasattr(made, "first_k_dense_replace"):
        made.first_k_dense_replace = 0
    return made


def decoder_config(name: str, config: Mapping[str, Any], keys: Iterable[str], kind: str = "llama") -> PreTrainedConfig:
    """The config of a module's decoder from its config.json, which may not say of which kind it is.

    It has as many layers as the tensors: those of another number would be made in vain, and some configs list them.
    """
    content = config.get("transformer_layer_config") if SPECULATORS in config else config
    if not isinstance(content, Mapping):
        raise unread(name, "its config.json has no transformer_layer_config")
    known = {key: value for key, value in content.items() if key not in ("model_type", "architectures", "auto_map")}
    numbers = {int(found[1]) for found in (re.match(r"layers\.(\d+)\.", key) for key in keys) if found}
    known["num_hidden_layers"] = len(numbers | {0})
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= known[key] if isinstance(known.get(key), Mapping) else {}
    named = str(content.get("model_type", kind))
    by_kind = {key: one for key, one in rope.items() if isinstance(one, Mapping)}  # of layers, which speculators reads
    if named in _ONE_ROPE:  # these classes rotate all
        known.pop("partial_rotary_factor", None)
        if by_kind:
            wanted = SLIDING if SLIDING in (known.get("layer_types") or [SLIDING]) else "full_attention"
            rope = dict(by_kind.get(wanted, next(iter(by_kind.values()))))
        if rope.pop("partial_rotary_factor", None) is not None or by_kind:
            known |= {"rope_scaling": None, "rope_parameters": rope}
    if "mrope" in (rope.get("type"), rope.get("rope_type")):  # its three parts have one position in a text
        known |= {"rope_scaling": None, "rope_parameters": {**rope, "type": "default", "rope_type": "default"}}
    if isinstance(kinds := known.get("layer_types"), list):
        known["layer_types"] = kinds[: len(numbers | {0})]
    if named == "llama" and SLIDING in known.get("layer_types", ()) and not known.get("attention_bias"):
        named = "ministral"  # Llama with windows by layer
    try:
        return AutoConfig.for_model(named, **known)
    except Exception as error:  # transformers raises many types for a config that it cannot use
        raise unread(name, f"its config is of no model of transformers: {plain_reason(error)}") from error


def unread(name: str, why: str) -> TreeoptError:
    return TreeoptError(Code.DRAFT_INVALID, f"{name} is not a draft module that treeopt reads", why=why)
