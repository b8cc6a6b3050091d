"""Training of the built-in model: a tokenizer and a small Llama."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

END = "<|end|>"


def train_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose token 0 ends a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END, model_max_length=context)


def blocks(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], length: int) -> Tensor:
    """int64 [n, length]: the texts, each with its end token, concatenated; an incomplete last block is dropped."""
    end = [tokenizer.eos_token_id]
    ids = [token for row in tokenizer(list(texts), verbose=False).input_ids for token in row + end]
    whole = len(ids) // length * length
    return torch.tensor(ids[:whole]).view(-1, length)


def pretrain(
    settings: Any, tokenizer: PreTrainedTokenizerFast, seen: Tensor, unseen: Tensor, folder: str | os.PathLike[str]
) -> dict[str, float]:
    """Train a Llama on token blocks, save it with its tokenizer, and return its losses.

    Args:
        settings: the `base` part of a recipe.
        tokenizer: saved beside the model; its end token ends texts.
        seen: int64 [n, context], for training.
        unseen: int64 [m, context], for evaluation.
        folder: for checkpoints and the model; an interrupted run continues from its last checkpoint.

    Returns:
        Mean loss in nats a token: `train_loss` over the first blocks trained on, `unseen_loss` over `unseen`.
    """
    model = new_llama(settings, tokenizer)
    checkpoints = Path(folder) / "checkpoints"
    arguments = trainer_arguments(settings, checkpoints, settings.sequences)
    trainer = Trainer(model=model, args=arguments, train_dataset=TensorDataset(seen), data_collator=_as_inputs)
    trainer.train(resume_from_checkpoint=any(checkpoints.glob("checkpoint-*")))
    model.config.use_cache = True  # the Trainer sets it to False
    model.to(torch.bfloat16).save_pretrained(folder)  # half the bytes
    tokenizer.save_pretrained(folder)
    # Losses of the saved model: in rounded weights, and without the mixed precision of training.
    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {"train_loss": mean_loss(saved, seen[: len(unseen)]), "unseen_loss": mean_loss(saved, unseen)}


def new_llama(settings: Any, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama of the sizes of a recipe's `BasePart`, with random weights; this seeds all random generators."""
    set_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=settings.attention_heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def trainer_arguments(settings: Any, checkpoints: Path, batch_size: int) -> TrainingArguments:
    """Arguments of a Trainer for a recipe's `BasePart`; `batch_size` counts rows of its data set."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=batch_size,
        max_steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="cosine",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
        logging_steps=50,
        save_steps=250,
        save_total_limit=1,
        report_to=[],
    )


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Nats a token over token blocks [n, length]."""
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in torch.split(rows, 8)]
    return math.fsum(losses) / len(rows)


def _as_inputs(rows: Sequence[tuple[Tensor]]) -> dict[str, Tensor]:
    """A batch of token blocks as inputs of the model."""
    ids = torch.stack([row for (row,) in rows])
    return {"input_ids": ids, "labels": ids}
