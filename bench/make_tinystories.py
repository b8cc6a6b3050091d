"""Make the folder of a very small real model, stories260K, which every treeopt command takes as --model.

    python bench/make_tinystories.py FOLDER [--heads]

The model is a Llama with 260,000 parameters that was trained on TinyStories (huggingface.co/karpathy/tinyllamas, MIT).
Its checkpoint (llama2.c's format) and its SentencePiece tokenizer, 3 MB, are downloaded from the hub. FOLDER then holds
a stock `LlamaForCausalLM` in float32 and a fast tokenizer. --heads also trains five Medusa heads on the model's own
stories, in FOLDER-medusa: about five minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPOSITORY = "karpathy/tinyllamas"
CHECKPOINT, PIECES = "stories260K/stories260K.pt", "stories260K/tok512.model"
LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHERS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
SPECIAL = ("<unk>", "<s>", "</s>")  # tokens 0, 1, 2
SPACE = "▁"  # SentencePiece's


def renamed(name: str) -> str:
    """The parameter's name in transformers: layers.0.attention.wq.weight -> model.layers.0.self_attn.q_proj.weight."""
    module = name.removesuffix(".weight")
    if module in OTHERS:
        return f"{OTHERS[module]}.weight"
    _, index, part = module.split(".", 2)
    return f"model.layers.{index}.{LAYER[part]}.weight"


def rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * size, d] of wq or wk: rotary pairs (0, 1), (2, 3), ... become (0, size/2), (1, size/2 + 1)."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def convert(checkpoint: dict[str, Any]) -> LlamaForCausalLM:
    """The stock model of a checkpoint of llama2.c: `model_args` and `model`, whose names may begin with _orig_mod."""
    sizes = checkpoint["model_args"]
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in checkpoint["model"].items()}
    heads = {"wq": sizes["n_heads"], "wk": sizes["n_kv_heads"] or sizes["n_heads"]}
    state = {}
    for name, weight in weights.items():
        kind = name.split(".")[-2]
        state[renamed(name)] = rotary_halves(weight, heads[kind]) if kind in heads else weight
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["dim"],
        intermediate_size=weights["layers.0.feed_forward.w1.weight"].shape[0],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=heads["wk"],
        max_position_embeddings=sizes["max_seq_len"],
        rms_norm_eps=sizes.get("norm_eps", 1e-5),
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each length-delimited field of a protobuf message; other fields are skipped."""
    at = 0

    def number() -> int:
        nonlocal at
        start = at
        while message[at] > 127:
            at += 1
        at += 1
        return sum((byte & 127) << 7 * i for i, byte in enumerate(message[start:at]))

    while at < len(message):
        field, kind = divmod(number(), 8)
        if kind == 0:
            number()
        else:
            size = number() if kind == 2 else {1: 8, 5: 4}[kind]
            at += size
            if kind == 2:
                yield field, message[at - size : at]


def tokenizer(model: bytes) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a SentencePiece model (BPE with byte fallback; earlier pieces are merged first)."""
    pieces = [dict(fields(piece))[1].decode() for field, piece in fields(model) if field == 1]
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for piece in pieces[len(SPECIAL) + 256 :]:
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += sorted((pair for pair in halves if ids.keys() >= set(pair)), key=lambda pair: [ids[t] for t in pair])
    made = Tokenizer(models.BPE(ids, merges, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="to write")
    parser.add_argument("--heads", action="store_true", help="also train five Medusa heads, in FOLDER-medusa")
    options = parser.parse_args()
    folder = options.folder
    if not (folder / "model.safetensors").is_file():
        model, pieces = (Path(hf_hub_download(REPOSITORY, name)) for name in (CHECKPOINT, PIECES))
        unfinished = folder.with_name(f"{folder.name}.partial")
        convert(torch.load(model, map_location="cpu", weights_only=True)).save_pretrained(unfinished)
        tokenizer(pieces.read_bytes()).save_pretrained(unfinished)
        os.replace(unfinished, folder)
    print(f"{folder}: a stock Llama model and its tokenizer")
    stories, heads = f"{folder}-stories.jsonl", f"{folder}-medusa"
    distill = ["distill", "--self-talk", "2400", "--max-new-tokens", "160", "--batch-size", "64", "-o", stories]
    train = ["train", "--data", stories, "--steps", "1200", "--holdout", "64", "-o", heads]
    for command in (distill, train) if options.heads else ():
        command += ["--model", str(folder)]
        print("treeopt", *command, flush=True)
        subprocess.run([sys.executable, "-m", "treeopt", *command], check=True)


if __name__ == "__main__":
    main()
