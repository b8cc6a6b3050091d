"""The compiled tree is what the decoder runs with: from a file, in a fresh process, and without any tree record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from decoding import stock
from helpers import random_tree
from predicted import predict
from program import treeopt
from tiny import random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.files.trees import save_tree
from treeopt.models.base import load_base
from treeopt.models.head_files import load_heads
from treeopt.texts.encode import Text
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree

DECODE = """
import json, sys, torch
torch.set_num_threads(1)
from treeopt.decode.decoder import TreeDecoder
from treeopt.models.base import load_base
from treeopt.models.head_files import load_heads
from treeopt.verify.buffers import load_buffers
decoder = TreeDecoder(load_base("pocket"), load_heads("pocket").heads, load_buffers(sys.argv[1]))
made = decoder.generate(json.loads(sys.argv[2]), 40)
print(json.dumps([[one.tokens, one.step_lengths] for one in made]))
"""


@pytest.mark.slow
def test_decodes_from_a_compiled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compile` wrote decodes in a fresh process: the text of stock generate, in the predicted steps."""
    monkeypatch.chdir(tmp_path)
    tree = random_tree(3, nodes=24, depth=4, ranks=5)
    save_tree(tree, "tree.yaml")
    treeopt("compile", "tree.yaml", "-o", "tree.safetensors")
    Path("tree.yaml").unlink()
    prompts = [[11, 5, 300, 42], [7, 9], [100, 20, 3]]
    done = subprocess.run(
        [sys.executable, "-c", DECODE, "tree.safetensors", json.dumps(prompts)], capture_output=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    base = load_base("pocket")
    answers = [stock(base, prompt, 40) for prompt in prompts]
    assert [tokens for tokens, _ in found] == answers
    texts = [Text(f"{i}", prompt, answer) for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]
    predicted = predict(base, load_heads("pocket").heads, tree, texts)
    assert [len(lengths) for _, lengths in found] == predicted.steps_by_sequence().tolist()
    assert predicted.tokens_per_step > 1.2


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_compiled_tree_is_the_tree(family: str) -> None:
    """A decoder given tensors takes the steps of one given their tree, whose record it knows."""
    base, tree = tiny_base(family, 1), random_tree(1, nodes=20, depth=3, ranks=4)
    heads = random_heads(base, 3)
    one, other = (TreeDecoder(base, heads, given) for given in (tree, compile_tree(tree)))
    assert other.tree == Tree(tree.paths)
    prompts = [[3, 8, 21], [40], list(range(5, 35))]
    assert one.generate(prompts, 30) == other.generate(prompts, 30)
