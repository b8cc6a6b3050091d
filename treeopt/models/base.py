"""The base model: a stock language model from `transformers`, unmodified, with its tokenizer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from treeopt.errors import Code, TreeoptError, check_choice, first_line
from treeopt.files.bundled import tokenizer_of
from treeopt.models.adapters import Adapter, merge, read_adapter
from treeopt.models.checkpoint import check_files, check_loaded, not_loadable, plain_reason, wrong_settings
from treeopt.models.devices import (
    DeviceMap,
    check_placed,
    device_names,
    devices_of,
    input_device,
    kept_before,
    placement,
)
from treeopt.models.hub import built_in, find_base, here, hub_reachable, unreachable
from treeopt.models.tensors import fingerprint
from treeopt.version import VERSION

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_LIMIT = 1 << 30  # context of models that do not state one
_CACHES = ("cache", "past_key_values", "cache_params", "state")  # of transformers from 5.24, before, of Mamba and RWKV
CACHE = next(name for name in _CACHES if name in CausalLMOutputWithPast.__dataclass_fields__)  # of stock models
_TRIED = 8  # tokens of the forward that a loaded model must pass


def cache_name(model: nn.Module) -> str:
    """The name of the cache in a model's forward and in its outputs."""
    taken = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters  # of a compiled model
    return next((name for name in _CACHES if name in taken), CACHE)


def shown_name(model: PreTrainedModel) -> str:
    """The folder or hub name of a model; its class where it was made in Python."""
    return str(getattr(model.config, "name_or_path", "") or type(model).__name__)


@dataclass(frozen=True)
class Base:
    """A loaded base model."""

    model: PreTrainedModel  # the causal language model
    tokenizer: PreTrainedTokenizerBase | None  # its tokenizer; None where it has none
    name: str  # folder or hub name, as given by the user
    notes: tuple[str, ...] = ()  # warnings for the user, such as weights of the checkpoint that are not used
    adapter: Adapter | None = None  # the adapter that is merged into the weights; None without
    compile: bool = False  # whether decoders run their forwards over trees through `torch.compile`
    # indices of the hidden states that forwards return, side by side; empty for the LM head's input alone
    reads: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of inputs and outputs."""
        return input_device(self.model)

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the layers, each once, in their order."""
        return tuple(dict.fromkeys(devices_of(self.model)))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16`, ..."""
        return str(self.dtype).removeprefix("torch.")

    def in_dtype(self, dtype: str) -> Base:
        """The same model with its weights in another dtype, a copy in memory; itself in its own dtype."""
        check_choice("dtype", dtype, DTYPES)
        if dtype == self.dtype_name:
            return self
        model = copy.deepcopy(self.model)
        single = getattr(model, "_keep_in_fp32_modules_strict", None) or ()  # such as the router's bias
        for key, weight in model.state_dict(keep_vars=True).items():  # no rotary frequencies, as in a loaded model
            if weight.is_floating_point() and not any(part in key for part in single):
                weight.data = weight.data.to(DTYPES[dtype])
        if eagerly(self.device, DTYPES[dtype]):
            model.set_attn_implementation("eager")
        elif eagerly(self.device, self.dtype) and getattr(model, "_supports_sdpa", False):
            model.set_attn_implementation("sdpa")
        return dataclasses.replace(self, model=model)

    def reading(self, states: tuple[int, ...]) -> Base:
        """The same model whose forwards return other hidden states: 0 are the embeddings, i > 0 the output of layer
        i - 1, the number of layers the LM head's input.
        """
        if states == self.reads:
            return self
        if states not in self._readers:
            other = copy.copy(self)  # of its own class, which may not keep the model alive
            for name in ("compiled", "_readers"):
                vars(other).pop(name, None)
            vars(other)["reads"] = states
            self._readers[states] = other
        return self._readers[states]

    @functools.cached_property
    def _readers(self) -> dict[tuple[int, ...], Base]:
        return {}

    @functools.cached_property
    def compiled(self) -> dict[int, Base]:
        """This base with a compiled forward, by the number of nodes; filled by decoders, which share them."""
        return {}

    @property
    def lm_head(self) -> nn.Linear:
        """The linear layer from hidden states to the vocabulary."""
        head: nn.Linear = self.model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor):
            what, fix = f"{self.name} has no LM head with a weight", "leave the LM head out of quantisation"
            raise TreeoptError(Code.MODEL_INVALID, what, fix=fix)
        return head

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        most: int | None = getattr(self.model.config.get_text_config(decoder=True), "unpadded_vocab_size", None)
        return min(self.rows, most or self.rows)

    @property
    def rows(self) -> int:
        """Rows of the LM head, of which Inkling's logits leave the last ones out."""
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """d, the width of the LM head's input."""
        return self.lm_head.weight.shape[1]

    @functools.cached_property
    def layers(self) -> int:
        """Number of layers with a cache; 0 where they are on several devices."""
        return int(self.model.config.get_text_config().num_hidden_layers) if len(self.devices) == 1 else 0

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        text = self.model.config.get_text_config()
        return int(getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or _NO_LIMIT)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the generation config; may be empty."""
        ids = self.model.generation_config.eos_token_id
        return () if ids is None else tuple(torch.as_tensor(ids).reshape(-1).tolist())

    @property
    def pad_id(self) -> int:
        """Padding token. It is embedded, though masked, so an id outside the vocabulary is not used."""
        choices = (self.model.generation_config.pad_token_id, *self.eos_ids, 0)
        return next(int(token) for token in choices if token is not None and 0 <= token < self.vocab_size)

    @functools.cached_property
    def _positions_by_padding(self) -> bool:
        """Whether the model, as RoBERTa, counts positions without padding tokens, where `generate` passes all."""
        return any(hasattr(module, "create_position_ids_from_input_ids") for module in self.model.modules())

    @functools.cached_property
    def _cache_name(self) -> str:
        return cache_name(self.model)

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def generate(
        self,
        ids: Tensor,
        mask: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        prompt_lookup_num_tokens: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Stock `generate` with no logits processors but those in `options`, ended by the end of text alone.

        The model's generation config is replaced, as `generate` adds its penalties and the like to any config.
        """
        sampling = {"do_sample": True, "temperature": float(temperature), "top_k": top_k, "top_p": top_p}
        chosen = {"prompt_lookup_num_tokens": prompt_lookup_num_tokens, **(sampling if temperature > 0 else {})}
        eos = list(self.eos_ids) or None
        config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=self.pad_id, **chosen)
        model = copy.copy(self.model)  # with a config of its own: threads may share a model
        model.generation_config = GenerationConfig()
        with self._numbers_only(sampled=temperature > 0):
            out: Tensor = model.generate(ids, attention_mask=mask, generation_config=config, **options)
        return out

    def versions(self) -> dict[str, str]:
        """Versions, kind of device and the name of the adapter, for the provenance of measurements."""
        return {
            "treeopt": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": device_names(self.model),
            **({"adapter": self.adapter.name} if self.adapter else {}),
        }

    def forward(self, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """One stock forward: logits, and last hidden states (after the final norm: the input of the LM head), or those
        that this base `reads` side by side.

        `logits_to_keep` may be int64 [B, n], positions of each row, on the device of `ids`; `cache` is for any model.

        Raises:
            TreeoptError: E502 where the model gives several hidden states for each token, as Gemma 3n does.
        """
        logits, hidden = self.outputs(ids, **inputs)
        self._check_states(hidden)
        return logits, hidden

    def _check_states(self, hidden: Tensor | None) -> None:
        if hidden is None or hidden.ndim != 3:
            what = f"{self.name} ({self.model.config.model_type}) cannot verify trees"
            given = "no hidden state" if hidden is None else "several hidden states for each token, and not the one"
            raise TreeoptError(Code.NO_TREES, what, why=f"its forward gives {given} that its LM head reads")

    def outputs(self, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """As `forward`, with hidden states of any shape."""
        out = self._run(ids, inputs)
        return out.logits, self._states(out)

    def continued(self, ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Tensor, Any]:
        """As `forward`, after the tokens of a cache of the model's own kind; also the cache with the new tokens.

        A cache of None begins a text. Caches may be changed in place. A model without a cache returns None.
        """
        out = self._run(ids, {**inputs, "cache": cache, "use_cache": True})
        states = self._states(out)
        self._check_states(states)
        return out.logits, states, getattr(out, self._cache_name, None)

    def _states(self, out: Any) -> Tensor:
        states: Tensor = out.hidden_states[-1]
        if not self.reads:
            return states
        if max(self.reads) >= len(out.hidden_states):  # LongCat's config counts each of its layers twice
            what = f"the drafter reads state {max(self.reads)} of {self.name}, which gives {len(out.hidden_states)}"
            raise TreeoptError(Code.DRAFT_MISMATCH, what, why=f"the numbers of a {self.model.config.model_type} differ")
        return torch.cat([out.hidden_states[index].to(states.device) for index in self.reads], dim=-1)

    def _run(self, ids: Tensor, inputs: dict[str, Any]) -> Any:
        """The stock outputs of one forward."""
        if (cache := inputs.pop("cache", None)) is not None:
            inputs[self._cache_name] = cache
        elif self._positions_by_padding:
            inputs.setdefault("position_ids", torch.arange(ids.shape[1], device=ids.device)[None])
        with contextlib.ExitStack() as stack:
            if len(self.devices) > 1 and isinstance(inputs.get("logits_to_keep"), Tensor):
                stack.enter_context(kept_before(self.lm_head, inputs.pop("logits_to_keep")))
            return self.model(ids, output_hidden_states=[*self.reads, -1] if self.reads else -1, **inputs)

    @functools.cached_property
    def logits_of_lm_head(self) -> bool:
        """Whether the logits of a forward are the outputs of the LM head: not where a model scales or caps them."""
        ids = torch.arange(min(_TRIED, self.vocab_size, self.context), device=self.device)
        with torch.no_grad():  # not inference_mode, as `check_runs`
            logits, states = self.outputs(ids[None], use_cache=False)
            fits = states is not None and states.ndim == 3 and states.shape[-1] == self.hidden_size
            return fits and torch.equal(logits, self.lm_logits(states))

    def not_finite(self, outputs: str = "logits or hidden states") -> TreeoptError:
        """E504 for outputs that are not finite, with the model's name."""
        what = f"the model {self.name} gives {outputs} that are not finite"
        why = f"its weights are damaged, or too large for {self.dtype_name}"
        return TreeoptError(Code.NOT_FINITE, what, why=why, fix="--dtype float32, or another copy of the model")

    def check_finite(self, *outputs: Tensor) -> None:
        """Raise E504 where logits or hidden states are NaN or +inf; some give -inf for tokens, or no states."""
        if not all((values < torch.inf).all() for values in outputs if values is not None):
            raise self.not_finite()

    @contextlib.contextmanager
    def _numbers_only(self, *, sampled: bool) -> Iterator[None]:
        """Raise E504 where the model gives NaN while a block runs stock `generate` on it.

        The largest logit of each forward's last position is NaN where any is. Greedy choices are looked at when the
        block ends, so that no step waits for the device. A draw from NaN ends a process on some devices, so that with
        `sampled` each forward is looked at before its draw.
        """
        largest: list[Tensor] = []

        def look(_model: nn.Module, _inputs: Any, out: Any) -> None:
            largest.append(out.logits[:, -1].amax())  # one number: threads may share a model
            if sampled:
                check()

        def check() -> None:
            if largest and torch.stack(largest).isnan().any():
                raise self.not_finite("logits")
            largest.clear()

        with self.model.register_forward_hook(look):
            yield
            check()

    def lm_logits(self, states: Tensor) -> Tensor:
        """The LM head's outputs for states [..., d], on their device: [..., V]. Some models scale or cap them."""
        logits: Tensor = self.lm_head(states)
        return logits.to(states.device)


def eagerly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention over few tokens is faster eagerly than through sdpa: in bfloat16 on a CPU, several times."""
    return device.type == "cpu" and dtype is torch.bfloat16


def load_base(
    name: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    load_in_4bit: bool = False,
    adapter: str | os.PathLike[str] | None = None,
) -> Base:
    """A base model from a folder or the hub, with its tokenizer: `.model` and `.tokenizer` are those of transformers.

    Args:
        name: folder or hub name; `pocket` and `pocket-draft` are built in.
        dtype: `float32`, `bfloat16`, `float16`; `auto` is float32 on the CPU and that of the checkpoint elsewhere.
        device: `cpu`, `cuda`, `cuda:1`, ...; `auto` is the accelerator of this process, else the CPU.
        device_map: divides the model among devices, as of transformers: `auto` is all accelerators of this machine, and
            the CPU where there is none; a dictionary has the device of each part by its name, and `cpu` or `disk` for
            weights that are loaded for each forward. None is one device.
        load_in_4bit: quantise the weights while loading; needs CUDA and the package bitsandbytes.
        adapter: folder of an adapter of this base, as `train_jointly` writes it, which is merged into the weights.

    Raises:
        TreeoptError: E201, E301 where model or adapter is not found; E203, E210, E304 where their files are damaged,
            need code to be run, or lack weights; E214 where the adapter is of another base; E401, E402, E403 where
            package, device or memory are missing, or an adapter is given for offloaded weights; E504 where its logits
            or hidden states are not finite.
        ValueError: for an adapter of a base in 4 bits, and for `device` with `device_map`.

    Examples:
        >>> import treeopt
        >>> base = treeopt.load_base("pocket")
        >>> base.name, base.tokenizer.decode(base.tokenizer("import os").input_ids)
        ('pocket', 'import os')
    """
    name = os.fspath(name)
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if adapter is not None and load_in_4bit:
        raise ValueError("an adapter is merged into the weights, which a base in 4 bits cannot hold exactly")
    read = None if adapter is None else read_adapter(adapter)
    place, options = placement(device, device_map, load_in_4bit=load_in_4bit)
    torch_dtype = DTYPES.get(dtype) or (torch.float32 if place.type == "cpu" else "auto")
    if isinstance(torch_dtype, torch.dtype) and eagerly(place, torch_dtype):
        options["attn_implementation"] = "eager"
    folder = find_base(name)
    local = built_in(name) is not None or here(name) is not None
    kind = check_files(name, folder)
    where, from_hub = str(folder) if local else name, not local and hub_reachable()
    options |= {"dtype": torch_dtype, "local_files_only": not from_hub}
    try:
        with warnings.catch_warnings(action="ignore"):  # `check_loaded` reports what matters
            model, info = kind.from_pretrained(
                where,
                trust_remote_code=False,  # the default asks on the terminal whether to run code of the checkpoint
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` refuses them with their names
                **options,
            )
        notes = check_loaded(name, model, info)
        if "device_map" in options:
            check_placed(model, name, device_map)
        else:
            model = model.to(place)
        model = model.eval() if read is None else merge(model.eval(), read)
    except TreeoptError:
        raise
    except Exception as error:  # transformers raises many types for a model that cannot be loaded
        if not local and isinstance(error, OSError):
            raise unreachable(name, error) from error
        raise not_loadable(name, error, folder) from error
    shown = os.path.normpath(name) if local and not built_in(name) else name
    base = Base(model, load_tokenizer(name, where, folder, local_files_only=not from_hub), shown, notes, read)
    check_runs(base)
    return base


def check_runs(base: Base) -> None:
    """Raise E304 where a model's settings are invalid or its forward fails, E504 where its outputs are not finite."""
    faults = list(wrong_settings(base.model))
    if faults:
        why = "config.json and generation_config.json must be valid for text generation"
        raise TreeoptError(Code.MODEL_INVALID, f"the model {base.name} cannot be used: {'; '.join(faults)}", why=why)
    ids = torch.arange(min(_TRIED, base.vocab_size, base.context), device=base.device)
    try:
        with torch.no_grad():  # not inference_mode: a model may cache tensors, and be trained later
            base.check_finite(*base.outputs(ids[None], use_cache=False))
    except TreeoptError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise not_loadable(base.name, error) from error
    except Exception as error:  # the types vary by model
        what = f"the model {base.name} cannot be run: its forward fails"
        raise TreeoptError(Code.MODEL_INVALID, what, why=f"{type(error).__name__}: {first_line(error)}") from error


_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*", "special_tokens_map.json")


def load_tokenizer(name: str, where: str, folder: Path, *, local_files_only: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the checkpoint has none: token ids can be decoded without one."""
    if tokenizer_of(folder) != folder:
        folder = tokenizer_of(folder)
        where = str(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, local_files_only=local_files_only, trust_remote_code=False
        )
    except Exception as error:  # the types that tokenizers raise vary
        if not any(file for pattern in _FILES for file in folder.glob(pattern)):
            return None
        what = f"the tokenizer of {name} cannot be loaded"
        fix = "use the original tokenizer files; without any, prompts must be token ids"
        raise TreeoptError(Code.MODEL_INVALID, what, why=plain_reason(error), fix=fix) from error
    return tokenizer


def now(base: Base) -> float:
    """Seconds, read after the base's devices have finished their work."""
    for device in base.devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """The seconds of successive parts of a job on a base's devices, by name."""

    def __init__(self, base: Base) -> None:
        self.seconds: dict[str, float] = {}
        self._base = base
        self._last = now(base)

    def lap(self, name: str) -> None:
        """End a part: its seconds are those since the last one ended, and more of an earlier part of that name."""
        end = now(self._base)
        self.seconds[name], self._last = self.seconds.get(name, 0.0) + end - self._last, end
