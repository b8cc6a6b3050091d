"""Loading of what `--draft` names: a draft model, an EAGLE head, a block drafter, or the base's own MTP layers."""

import contextlib
import copy
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from treeopt.defaults import BLOCK, EAGLE, MODEL, MTP
from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.read import MOST_SETTINGS, parse_json, read_bytes
from treeopt.models import draft_layouts as layouts
from treeopt.models.base import DTYPES, Base, load_base
from treeopt.models.block_layouts import PARTS, block_layout, check_mask, is_block
from treeopt.models.block_module import BlockModule, BlockWiring
from treeopt.models.checkpoint import plain_reason
from treeopt.models.compatibility import check_draft
from treeopt.models.draft_module import OWN, DraftModule, StateModule
from treeopt.models.hub import built_in, find_base, find_weights, here, looks_local
from treeopt.models.tensors import State, fingerprints, listed, misfit, read_config, tensor_loaders

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# An index first, which may name a file of MTP layers beside the base's.
_WITH_MTP = (*_WEIGHTS[1::-1], *_WEIGHTS[:1:-1])
_DECODER, _EXPERT = "decoder.", re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_FEW_LAYERS = 4  # a config of more describes a draft model


def load_draft(name: str, base: Base, *, dtype: str = "auto", device: str = "auto") -> Base:
    """The draft model, EAGLE head or block drafter of a folder or hub name, or for `mtp` the base's own MTP layers.

    Its kind is read from its files. Modules have the base's dtype and device; `dtype` and `device` are of draft models.

    Raises:
        TreeoptError: as `load_base`; E213 where it does not fit the base, E216 where tensors are missing, unexpected or
            of another shape, and for a drafter of a kind that is not read.
    """
    if name == MTP and here(name) is None:
        return _load_mtp(base)
    folder = find_base(name)
    config = _config_in(folder)
    _check_kind(name, layouts.other_kind([], config))
    if _may_be_module(config):
        folder = find_weights(name, folder)
        loaders = _unwrapped(tensor_loaders(_weights(folder, name), lambda _, keys: keys))
        _check_kind(name, layouts.other_kind(loaders, config))
        if is_block(loaders, config) or layouts.is_eagle(loaders):
            if not config:
                raise TreeoptError(
                    Code.FILE_MISSING, f"{name} is a draft module, and has no config.json with its sizes"
                )
            layers = int(base.model.config.get_text_config().num_hidden_layers)
            state = {key: load() for key, load in loaders.items()}
            layout_of = block_layout if is_block(loaders, config) else layouts.eagle_layout
            layout = layout_of(name, config, {key: tuple(one.shape) for key, one in state.items()}, layers)
            _check_config(name, base, config)
            notes = (*_made_for(name, base, config), *_other_tokens(name, base, folder))
            return dataclasses.replace(_module(name, base, layout, state), notes=notes)
        if config.get(layouts.SPECULATORS) == MTP:
            if not (keys := layouts.mtp_tensors(loaders, base.model.config)):
                raise TreeoptError(Code.DRAFT_INVALID, f"{name} has no tensors of an MTP layer: {listed(loaders)}")
            layout = layouts.mtp_layout(keys, base.model.config, base.hidden_size, config)
            module = _module(name, base, layout, {key: loaders[key]() for key in keys.values()})
            return dataclasses.replace(module, notes=tuple(_made_for(name, base, config)))
    draft = load_base(name, dtype=dtype, device=device)
    check_draft(base, draft)
    return draft


def _config_in(folder: Path) -> dict[str, Any]:
    """The config of a drafter, with what SpecForge's script of P-EAGLE writes beside it."""
    return {**read_config(folder / "config.json"), **read_config(folder / "peagle_config.json")}


def _check_kind(name: str, kind: str) -> None:
    """Raise E216 for a drafter of a kind that is recognised and not read."""
    if kind:
        fix = "an EAGLE head, a block drafter, a draft model, or --draft mtp; without --draft --drafter ngram"
        raise TreeoptError(Code.DRAFT_INVALID, f"{name} is {kind}", why="it is not read yet", fix=fix)


def _may_be_module(config: Mapping[str, Any]) -> bool:
    """Whether a config may be of a module: a config of speculators, of a block drafter, or of few layers."""
    layers = config.get("num_hidden_layers")
    block = is_block([], config) or any(part in config for part in PARTS) or layouts.is_parallel([], config)
    return layouts.SPECULATORS in config or block or not isinstance(layers, int) or layers <= _FEW_LAYERS


def _weights(folder: Path, name: str, files: Sequence[str] = _WEIGHTS) -> Path:
    found = next((folder / file for file in files if (folder / file).exists()), None)
    if found is None:
        raise TreeoptError(Code.FILE_MISSING, f"{name} has no weights: none of {', '.join(_WEIGHTS)}")
    return found


def _unwrapped(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors of a module by their names without the prefix of a class around it: NeMo's, or DataParallel's."""
    prefix = next((one for one in ("model.", "module.", "module.model.") if f"{one}fc.weight" in tensors), "")
    found = {key.removeprefix(prefix): one for key, one in tensors.items()}
    return found if len(found) == len(tensors) else tensors


def _load_mtp(base: Base) -> Base:
    """The MTP layer in the base's checkpoint; E216 where it has none."""
    folder = find_base(base.name)
    config, loaders = base.model.config, dict[str, Any]()
    if folder.is_dir() and any((folder / file).exists() for file in _WEIGHTS):
        loaders |= tensor_loaders(_weights(folder, base.name, _WITH_MTP), lambda _, keys: _all_mtp(keys, config))
    tensors, unread = layouts.mtp_tensors(loaders, config), layouts.unread_mtp(config)
    other = [key for key in loaders if re.search(r"(^|\.)mtp\w*\.", key)]
    if not tensors or unread:
        kind = f"{unread}'s, which is not read" if unread else f"another one, with tensors such as {listed(other)}"
        why = f"its layout is {kind}" if other else "it has no tensors of one"
        what = f"the checkpoint of {base.name} ({config.model_type}) has no MTP layer that treeopt reads"
        fix = "--draft FOLDER of an EAGLE head or a draft model, or without --draft --drafter ngram"
        raise TreeoptError(Code.DRAFT_INVALID, what, why=why, fix=fix)
    count, layers = max(1, layouts.mtp_layers(config)), list[Base]()
    while tensors and len(layers) < count:
        lm_head = _lm_head(base, tensors, loaders)
        layout = layouts.mtp_layout(tensors, config, base.hidden_size, number=len(layers), lm_head=lm_head)
        state = {key: loaders[key]() for key in tensors.values()}
        gate = tensors.get("self_attn.g_proj.weight")  # of Step-3.7 one row for each head
        if gate is not None and layout.config.model_type == "step3p5" and state[gate].ndim == 2:
            layout.config.num_attention_heads = len(state[gate])
        layers.append(_module(MTP, base, layout, state))
        tensors = layouts.mtp_tensors(loaders, config, len(layers))
    module = layers[0]
    assert isinstance(module.model, DraftModule)
    for layer in layers[1:]:
        module.model.append(layer.model)
    note = f"warning: {base.name} has {count} MTP layers by its config.json, and its checkpoint has {len(layers)}"
    return dataclasses.replace(module, notes=(note,)) if len(layers) < count else module


def _all_mtp(keys: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """The names of the tensors of all MTP layers among a base's."""
    known, number, found = list(keys), 0, list[str]()
    while layer := layouts.mtp_tensors(known, config, number):
        found += layer.values()
        number += 1
    return list(dict.fromkeys(found))


def _lm_head(base: Base, tensors: Mapping[str, str], loaders: Mapping[str, Callable[[], Tensor]]) -> tuple[str, int]:
    """The name and rows of an LM head of an MTP layer that is not a copy of the base's, such as Step-3.7's.

    E216 where its embeddings are no copies.
    """
    shared = {"embed_tokens.weight": base.model.get_input_embeddings(), **dict.fromkeys(layouts.LM_HEADS, base.lm_head)}
    for key, module in shared.items():
        if key in tensors:
            own, of_base = loaders[tensors[key]](), module.weight
            same = own.shape == of_base.shape
            if same and torch.equal(own.to(of_base.device, of_base.dtype), of_base):
                continue
            if same and key in layouts.LM_HEADS:
                return tensors[key], len(own)
            what = f"the MTP layer of {base.name} has a {tensors[key]} that is not the base's"
            why = "a layer with embeddings of its own, or an LM head of another shape, is not read"
            raise TreeoptError(Code.DRAFT_INVALID, what, why=why)
    return "", 0


def _check_config(name: str, base: Base, config: Mapping[str, Any]) -> None:
    """Raise E213 where a config is of a vocabulary that is not the base's."""
    inner = config.get("transformer_layer_config", config)
    vocab = inner.get("vocab_size") if isinstance(inner, Mapping) else None
    if isinstance(vocab, int) and vocab not in (base.vocab_size, base.rows):
        raise _mismatch(name, base, f"its vocabulary has {vocab} tokens, the base's {base.vocab_size}")


def _made_for(name: str, base: Base, config: Mapping[str, Any]) -> Iterator[str]:
    """Warnings where a config names another base, by the last part of the name, as folders differ, or other weights."""
    parts = (config.get("speculators_config"), "verifier", "name_or_path"), (config, "base", "name")
    for whole, part, key in parts:
        inner = whole.get(part) if isinstance(whole, Mapping) else None
        named = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(named, str) and PurePath(named).name != PurePath(base.name).name:
            yield f"warning: {name} was made for {named}, by its config.json, and the base is {base.name}"
    inner = config.get("base")
    weights = inner.get("fingerprint") if isinstance(inner, Mapping) else None
    if isinstance(weights, str) and weights not in fingerprints(base.model).values():
        yield f"warning: {name} was made for other weights than those of {base.name}, by its config.json"


def _other_tokens(name: str, base: Base, folder: Path) -> Iterator[str]:
    """A warning where the tokenizer beside a module gives tokens other numbers than the base's does."""
    of_base, own = {} if base.tokenizer is None else base.tokenizer.get_vocab(), dict[str, int]()
    with contextlib.suppress(TreeoptError, ValueError, LookupError, TypeError):  # a module needs no tokenizer
        found = parse_json(read_bytes(folder / "tokenizer.json", MOST_SETTINGS))["model"]["vocab"]
        own = found if isinstance(found, dict) else {token: number for number, (token, _) in enumerate(found)}
    if other := sum(of_base.get(token, number) != number for token, number in own.items()):
        yield f"warning: {name} was made for another tokenizer: {other} of its tokens have other numbers here"


def _module(name: str, base: Base, layout: layouts.ModuleLayout, state: State) -> Base:
    """The module of these tensors as a model, in the base's dtype and on its device."""
    wiring, text = layout.wiring, base.model.config.get_text_config()
    kind: Any = BlockModule if isinstance(wiring, BlockWiring) else DraftModule
    if wiring.kind == MTP and type(layout.config) not in MODEL_MAPPING:  # Step-3.7's text model
        kind = functools.partial(kind, kind=type(base.model.get_decoder()))
    if wiring.state_size != text.hidden_size:
        raise _mismatch(name, base, f"it reads states of width {wiring.state_size}, the base's are {text.hidden_size}")
    width = layout.config.hidden_size
    if width != base.hidden_size and not (wiring.own_embeddings and wiring.vocabulary):
        raise _mismatch(name, base, f"its hidden size is {width}, the base's {base.hidden_size}")
    weights = (key for key in state if layout.renamed(key) != layouts.DROPPED)
    if odd := [key for key in weights if state[key].dtype not in (*DTYPES.values(), torch.int64)]:
        what = f"{name} has weights of {state[odd[0]].dtype}, such as {odd[0]}"
        fix = "a module in 16 or 32 bits"
        raise TreeoptError(Code.DRAFT_INVALID, what, why="quantised modules are not read", fix=fix)
    layout.config._attn_implementation = base.model.config._attn_implementation
    if wiring.kind == BLOCK:
        check_mask(name, wiring, base.rows)
    shared = base.model.get_input_embeddings(), base.lm_head, base.rows
    try:
        with torch.device("meta"):  # a wrong config could describe a module that does not fit into memory
            described = kind(layout.config, wiring, *shared)
        tensors = _fitting(name, described, layout, state, base.model.config.model_type)
        module = kind(layout.config, wiring, *shared)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        what = f"{name} is read as {wiring.title}, and no module can be made from its config"
        raise TreeoptError(Code.DRAFT_INVALID, what, why=plain_reason(error)) from error
    module.load_state_dict(tensors, strict=False)
    if wiring.vocabulary:
        module.tokens.copy_(_tokens(name, base, state, wiring.vocabulary))
    if not all(parameter.isfinite().all() for parameter in module.parameters()):
        raise TreeoptError(Code.NOT_FINITE, f"{name} has weights that are not finite")
    return beside(base, module, name)


def in_dtype_of(base: Base, draft: Base) -> Base:
    """A draft model or module beside a copy of its base in another dtype, a copy in that one."""
    copied = draft.in_dtype(base.dtype_name)
    return beside(base, copied.model, draft.name) if isinstance(draft.model, StateModule) else copied


def beside(base: Base, module: StateModule, name: str) -> Base:
    """A module as a draft of a base, on its device and in its dtype."""
    single = getattr(getattr(module, "decoder", None), "_keep_in_fp32_modules_strict", None) or ()
    for key, parameter in module.requires_grad_(False).named_parameters():
        if not any(part in key for part in single):  # Inkling's convolutions
            parameter.data = parameter.data.to(base.dtype)
    for one in (module, *getattr(module, "further", ())):
        one.of_base = (base.model.get_input_embeddings(), base.lm_head)
    module.to(base.device).eval()  # buffers, such as rotary frequencies, keep their dtype
    module.config.max_position_embeddings = base.context  # positions beyond those of its config are as far apart
    return Base(module, base.tokenizer, name)


def _fitting(
    name: str, module: StateModule, layout: layouts.ModuleLayout, state: State, of_base: str
) -> dict[str, Tensor]:
    """The tensors by a module's names; E216 names those that are missing, unexpected or of another shape.

    `of_base` is the type of the base's config.
    """
    read = [key for key in state if layout.renamed(key) != layouts.DROPPED]
    known = {layout.renamed(key): key for key in read}
    twice = [key for key in read if known[layout.renamed(key)] != key]
    tensors = {made: state[key] for made, key in known.items()}
    expected = {key: tuple(one.shape) for key, one in module.state_dict().items() if key not in OWN}
    odd = _odd_experts(state)
    if layout.wiring.kind == MTP and not odd:
        tensors = _converted(name, module, tensors, of_base)
    names = {key: known.get(key) or layout.original(key, known) for key in (*expected, *tensors)}
    stored = {names[key]: one for key, one in tensors.items()} | {key: state[key] for key in twice}
    if fault := odd or misfit(stored, {names[key]: shape for key, shape in expected.items()}):
        raise TreeoptError(Code.DRAFT_INVALID, f"{name} is read as {layout.wiring.title}, and {fault}")
    return tensors


def _odd_experts(state: State) -> str:
    """As `misfit`, of experts that are stored one by one: each has the tensors of the others."""
    found = {key: match for key in state if (match := _EXPERT.fullmatch(key))}
    numbers = {match[2] for match in found.values()}
    shapes = dict[str, tuple[int, ...]]()
    for place, part in sorted({(match[1], match[3]) for match in found.values()}):
        names = [f"{place}{number}{part}" for number in numbers]
        known = [tuple(state[key].shape) for key in names if key in state]
        shapes |= dict.fromkeys(names, max(known, key=known.count))
    return misfit({key: state[key] for key in found}, shapes)


def _converted(name: str, module: DraftModule, tensors: Mapping[str, Tensor], of_base: str) -> dict[str, Tensor]:
    """The tensors, those of decoder layers as transformers stores them, such as the experts of a layer in one."""
    part = {key.removeprefix(_DECODER): one for key, one in tensors.items() if key.startswith(_DECODER)}
    rest = {key: one for key, one in tensors.items() if not key.startswith(_DECODER)}
    width = module.decoder.config.hidden_size
    unused = {"embed_tokens.weight": torch.zeros(1, width), "norm.weight": torch.ones(width)}
    if hasattr(module.get_input_embeddings(), "embed_norm"):
        unused["embed_tokens.embed_norm.weight"] = torch.ones(width)
    config = copy.copy(module.decoder.config)
    if get_checkpoint_conversion_mapping(config.model_type) is None:  # names are those of a model of images, too
        config.model_type = of_base
    try:
        with warnings.catch_warnings(action="ignore"):
            made, info = type(module.decoder).from_pretrained(
                None,
                config=config,
                state_dict=part | unused,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_fitting` refuses them with their names
            )
    except Exception as error:  # transformers raises many types
        what = f"the decoder layer of {name} cannot be loaded"
        raise TreeoptError(Code.DRAFT_INVALID, what, why=first_line(error)) from error
    found = {key: torch.empty(shape, device="meta") for key, shape, _ in info["mismatched_keys"]}
    converted = {**made.layers.state_dict(prefix="layers."), **found}
    converted = {key: one for key, one in converted.items() if key not in info["missing_keys"]}
    extra = {key: part[key] for key in info["unexpected_keys"] if key in part}
    return rest | {_DECODER + key: one for key, one in (converted | extra).items()}


def _tokens(name: str, base: Base, state: State, count: int) -> Tensor:
    """The base's token of each of a module's vocabulary: d2t are their distances from the module's own numbers."""
    offsets = state.get("d2t")
    if offsets is None or count == base.rows:
        if count != base.rows:
            what = f"{name} has a vocabulary of {count} tokens and no d2t, which says what they are in the base's"
            raise TreeoptError(Code.DRAFT_INVALID, what)
        return torch.arange(count)
    whole = not offsets.is_floating_point() and tuple(offsets.shape) == (count,)
    tokens = torch.arange(count) + offsets.long() if whole else torch.zeros(0, dtype=torch.long)
    inside = state.get("t2d")
    fits = whole and 0 <= int(tokens.min()) <= int(tokens.max()) < base.rows and len(set(tokens.tolist())) == count
    # Engines do not read t2d, which EAGLE's class begins with zeros and SpecForge's with ones.
    if fits and inside is not None and len(inside) > int(tokens.max()) and int(inside.bool().sum()) == count:
        fits = bool(inside.bool()[tokens].all())
    if not fits:
        what = f"{name} has a d2t that is not {count} distances to different tokens of the base's {base.rows}"
        marked = [] if inside is None else inside.flatten().bool().nonzero().flatten().tolist()
        is_tokens = bool(marked) and sorted(offsets.flatten().tolist()) == marked
        fix = "its d2t holds tokens: subtract each one's own number, 0, 1, .." if is_tokens else ""
        raise TreeoptError(Code.DRAFT_INVALID, what, why="or its t2d marks other tokens", fix=fix)
    return tokens


def _mismatch(name: str, base: Base, why: str) -> TreeoptError:
    fix = "--draft with a module of this base, or without --draft"
    return TreeoptError(Code.DRAFT_MISMATCH, f"{name} was not made for {base.name}: {why}", fix=fix)


def kind_in_files(name: str) -> str:
    """The kind of what `--draft` names, a key of `DRAFT_KINDS`, by its files; without any that of a draft model."""
    if here(name) is None and built_in(name) is None and (name == MTP or looks_local(name)):
        return MTP if name == MTP else MODEL
    folder = find_base(name)
    config = _config_in(folder)
    if not _may_be_module(config):
        return MODEL
    folder = find_weights(name, folder)
    if not any((folder / file).exists() for file in _WEIGHTS):
        return MODEL
    tensors = _unwrapped(tensor_loaders(_weights(folder, name), lambda _, __: ()))
    if is_block(tensors, config):
        return BLOCK
    if layouts.is_eagle(tensors):
        return BLOCK if layouts.is_parallel(tensors, config) else EAGLE
    return MTP if config.get(layouts.SPECULATORS) == MTP else MODEL
