"""The base model: a stock causal language model from `transformers`, unmodified, with its tokenizer."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.models.fingerprint import fingerprint
from treeopt.models.heads import MedusaHeads
from treeopt.models.hub import built_in, hub_reachable, looks_local, unreachable
from treeopt.version import VERSION

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_LIMIT = 1 << 30  # context of models that do not state one


@dataclass(frozen=True)
class Base:
    """A loaded base model; `name` is what the user called it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16`, ..."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def lm_head(self) -> nn.Linear:
        """The linear layer from hidden states to the vocabulary."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """d, the width of the LM head's input."""
        return self.lm_head.weight.shape[1]

    @functools.cached_property
    def layers(self) -> int:
        """Layers with a cache, where they are all on one device; 0 where they lie on several."""
        devices = {parameter.device for parameter in self.model.parameters()}
        return int(self.model.config.get_text_config().num_hidden_layers) if len(devices) == 1 else 0

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else _NO_LIMIT

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the model's generation config; none is possible."""
        ids = self.model.generation_config.eos_token_id
        return () if ids is None else tuple(torch.as_tensor(ids).reshape(-1).tolist())

    @property
    def pad_id(self) -> int:
        """Filler beyond a text's end; never looked at."""
        pad = self.model.generation_config.pad_token_id
        return int(pad) if pad is not None else self.eos_ids[0] if self.eos_ids else 0

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def generate(
        self, ids: Tensor, mask: Tensor, max_new_tokens: int, *, temperature: float = 0.0, **more: Any
    ) -> Tensor:
        """Stock `generate` under no rule but the end of text.

        A model's own generation config may hold penalties, forbidden tokens and the like, which `generate` adds to
        every config that it is given; so it is set aside for the call.

        Args:
            ids: int64 [B, T], padded on the left.
            mask: int64 [B, T], 0 at the padding.
            max_new_tokens: budget.
            temperature: 0 is greedy; above, tokens are sampled from the whole distribution.
            more: for `generate` itself, such as stopping criteria.

        Returns:
            int64 [B, T + new].
        """
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
        eos = list(self.eos_ids) or None
        config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=self.pad_id, **sampling)
        own = self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            out: Tensor = self.model.generate(ids, attention_mask=mask, generation_config=config, **more)
        finally:
            self.model.generation_config = own
        return out

    def versions(self) -> dict[str, str]:
        """What a measurement with this model runs on."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {
            "treeopt": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": device,
        }

    def forward(self, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """One stock forward: logits and last hidden states (after the final norm, what the LM head reads)."""
        out = self.model(ids, output_hidden_states=-1, **inputs)
        return out.logits, out.hidden_states[-1]


def load_base(
    name: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", load_in_4bit: bool = False
) -> Base:
    """A base model from a folder or the hub.

    Args:
        name: folder or hub name; `pocket` is the built-in model.
        dtype: `float32`, `bfloat16`, `float16`; `auto` is float32 on the CPU and the checkpoint's own elsewhere.
        device: `cpu`, `cuda`, `cuda:1`, ...; `auto` is this process's accelerator, else the CPU.
        load_in_4bit: quantise the weights while loading; on CUDA, by the package bitsandbytes.

    Raises:
        TreeoptError: E201, E301, E304 where the model cannot be had or read; E401, E402 where the package or the device
            is not there.
    """
    name = os.fspath(name)
    place = pick_device(device)
    wanted = DTYPES.get(dtype) or (torch.float32 if place.type == "cpu" else "auto")
    options: dict[str, Any] = _quantised(place) if load_in_4bit else {}
    path = built_in(name) or Path(name).expanduser()
    if not path.exists():
        if looks_local(name):
            raise TreeoptError(Code.FILE_MISSING, f"there is no base model {name}", at=f"--model {name}")
        options["local_files_only"] = not hub_reachable()
    where = str(path) if path.exists() else name
    try:
        # Attention over few tokens in bfloat16 is several times slower through sdpa than eagerly on a CPU.
        slow_sdpa = place.type == "cpu" and wanted is torch.bfloat16
        attention = {"attn_implementation": "eager"} if slow_sdpa else {}
        model = AutoModelForCausalLM.from_pretrained(where, dtype=wanted, **options, **attention)
    except Exception as error:  # transformers raises many kinds for one fact: this is not a loadable model
        if not path.exists():
            raise unreachable(name, "--model", error) from error
        what = f"{name} is not a model that transformers can load"
        raise TreeoptError(Code.MODEL_INVALID, what, why=first_line(error)) from error
    try:
        model = model if load_in_4bit else model.to(place)
    except (RuntimeError, AssertionError) as error:
        raise _unusable(str(place), first_line(error)) from error
    called = os.path.normpath(name) if path.exists() and not built_in(name) else name
    return Base(model.eval(), _load_tokenizer(where, options), called)


def check_heads_fit(base: Base, heads: MedusaHeads, name: str) -> None:
    """Raise E212 unless the heads' sizes are the base's."""
    faults = []
    if heads.hidden_size != base.hidden_size:
        faults.append(f"hidden size {heads.hidden_size}, the base has {base.hidden_size}")
    if heads.vocab_size is not None and heads.vocab_size != base.vocab_size:
        faults.append(f"vocabulary {heads.vocab_size}, the base has {base.vocab_size}")
    if faults:
        what = f"the heads {name} do not fit {base.name}: {'; '.join(faults)}"
        raise TreeoptError(Code.HEADS_MISMATCH, what, fix="name the base model they were trained on with --model")


def heads_like(base: Base, heads: MedusaHeads) -> MedusaHeads:
    """The heads on the base's device and in its dtype; the caller's own stay as they are."""
    if (heads.bias.device, heads.bias.dtype) == (base.device, base.dtype):
        return heads
    return copy.deepcopy(heads).to(base.device, base.dtype)


def pick_device(name: str) -> torch.device:
    """`auto` or a device by name.

    Raises:
        TreeoptError: E402 where it is not there.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator()
        # Under torchrun each process has the accelerator of its own rank.
        return torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0))) if found else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise _unusable(name, first_line(error)) from error
    return device


def _quantised(place: torch.device) -> dict[str, Any]:
    """What `from_pretrained` takes for a base in 4 bits; its LM head stays as it is."""
    if place.type != "cuda":
        what = f"a base in 4 bits needs a CUDA device; this one is {place}"
        raise TreeoptError(Code.DEVICE_UNUSABLE, what, fix="leave out --load-in-4bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        what = "a base in 4 bits needs the package bitsandbytes"
        raise TreeoptError(Code.PROGRAM_MISSING, what, fix="pip install bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": config, "device_map": {"": place}}


def _load_tokenizer(where: str, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the checkpoint has none: decoding ids works without."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError):
        return None
    return tokenizer


def _unusable(device: str, why: str) -> TreeoptError:
    return TreeoptError(Code.DEVICE_UNUSABLE, f"the device {device!r} cannot be used here", why=why, fix="--device cpu")
