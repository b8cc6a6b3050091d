"""heads show and heads convert: what they print, what they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

from engine_heads import READERS
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json
from tiny import random_heads, tiny_base

from treeopt.engines import HEAD_READERS as TARGETS
from treeopt.models.head_files import load_heads, save_heads


def test_show_describes_the_built_in_heads() -> None:
    """Layout, sizes and targets, for people and for programs."""
    found = treeopt_json("heads", "show", "pocket")
    loaded = load_heads("pocket").heads
    assert found["layout"].startswith("Medusa v")
    assert (found["heads"], found["hidden_size"]) == (loaded.num_heads, loaded.hidden_size)
    assert found["base"] == "pocket"
    assert set(found["converts"]) == set(TARGETS)
    text = treeopt("heads", "show", "pocket").stdout
    assert f"heads          {loaded.num_heads}\n" in text
    assert "--for nxdi" in text


def test_show_says_what_a_layout_cannot_hold() -> None:
    """The reason is printed beside the layout."""
    save_heads(random_heads(tiny_base("llama"), 2, blocks=2), "heads", base="owner/base")
    assert "1 block only" in treeopt_json("heads", "show", "heads")["converts"]["nxdi"]
    assert "--for nxdi      no: " in treeopt("heads", "show", "heads").stdout


@looped("to", ["medusa", "tgi", "vllm", "nxdi"])
def test_convert_writes_what_the_engine_reads(to: str) -> None:
    """The files are read as the engine reads them, LM heads included; the warnings of the source are passed on."""
    base = tiny_base("llama")
    base.model.save_pretrained("base")
    save_heads(random_heads(base, 2, shared=True), "heads", base="base")
    found = treeopt_json("heads", "convert", "heads", "--for", to, "-o", "out")
    assert found["from"] == "Medusa v2, with the base's LM head"
    assert all(Path(file).is_file() for file in found["files"])
    read = READERS[to](Path("out"))
    assert len(read.blocks) == 2
    assert (read.lm_heads is not None) == (to in ("vllm", "nxdi"))
    assert error_number(treeopt("heads", "convert", "heads", "--for", to, "-o", "out", status=3)) == "E202"
    treeopt("heads", "convert", "heads", "--for", to, "-o", "out", "--force")


def test_heads_of_an_adapter_need_the_merged_base() -> None:
    """Heads that share the LM head were trained with that of the base with its adapter."""
    base = tiny_base("llama")
    base.model.save_pretrained("base")
    save_heads(random_heads(base, 2, shared=True), "heads", base="base")
    config = json.loads(Path("heads/config.json").read_text())
    config["treeopt"] = {**config.get("treeopt", {}), "method": "Medusa-2", "base": "0123456789abcdef"}
    Path("heads/config.json").write_text(json.dumps(config))
    line = ("heads", "convert", "heads", "--for", "medusa", "-o", "out")
    assert "--model FOLDER of the merged checkpoint" in error_of("E215", *line)
    assert "need --with-lm-heads" in treeopt(*line, "--model", "base").stdout


def test_show_says_that_the_base_is_not_known() -> None:
    """The config of heads for vLLM names no base model."""
    save_heads(random_heads(tiny_base("llama"), 2), "heads", base="owner/base")
    assert "base           owner/base\n" in treeopt("heads", "show", "heads").stdout
    Path("heads/config.json").write_text("{}")
    assert "base           not known\n" in treeopt("heads", "show", "heads").stdout


def test_convert_refusals() -> None:
    """No base model, the source as output, a layout that cannot hold the heads: one error each."""
    heads = random_heads(tiny_base("llama"), 2, blocks=2)
    save_heads(heads, "heads", base="owner/base")
    treeopt("heads", "convert", "heads", "--for", "vllm", "-o", "v")
    Path("v/config.json").unlink()
    assert error_number(treeopt("heads", "convert", "v", "--for", "tgi", "-o", "o", status=3)) == "E215"
    assert error_number(treeopt("heads", "convert", "heads", "--for", "nxdi", "-o", "o", status=3)) == "E215"
    error_of("E204", "heads", "convert", "heads", "--for", "tgi", "-o", "heads", "--force")
    assert not Path("o").exists()
