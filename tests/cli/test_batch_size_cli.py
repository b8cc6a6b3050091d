"""`--batch-size auto`: what is said where memory runs out, what is stored, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from program import treeopt

from treeopt.files.calibrations import load_calibration
from treeopt.texts import answers as answers_module
from treeopt.texts.encode import Text

COMMON = ["calibrate", "--limit", "5", "--max-new-tokens", "6"]


def test_a_run_that_halves_says_so_once_and_is_made_again_by_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for 2 prompts: one line names the sizes; the traces are those of 2; the file stores `auto`."""
    whole = answers_module.continue_texts

    def limited(base: Any, texts: Sequence[Text], **options: Any) -> list[Text]:
        if len(texts) > 2:
            raise MemoryError
        return whole(base, texts, **options)

    monkeypatch.setattr(answers_module, "continue_texts", limited)
    result = treeopt(*COMMON, "--batch-size", "auto", "-o", "auto.safetensors")
    said = [line for line in result.stderr.splitlines() if "memory ran out" in line]
    assert said == ["memory ran out: from here on at most 2 prompts at once, not 64"]
    treeopt(*COMMON, "--batch-size", "2", "-o", "two.safetensors")
    auto, two = (load_calibration(name) for name in ("auto.safetensors", "two.safetensors"))
    assert auto.ranks.tolist() == two.ranks.tolist()
    assert auto.token_hashes == two.token_hashes
    Path("run.yaml").write_text(treeopt("show", "auto.safetensors", "--options").stdout)
    assert 'batch-size: "auto"' in Path("run.yaml").read_text()
    treeopt("calibrate", "--config", "run.yaml", "-o", "again.safetensors")
    assert Path("again.safetensors").read_bytes() == Path("auto.safetensors").read_bytes()


@looped(
    ("options", "message"),
    [
        (("--batch-size", "auto", "--shard", "0/2"), "--shard needs a --batch-size that is a number"),
        (("--batch-size", "many"), "or auto"),
        (("--batch-size", "0"), "x>=1"),
    ],
)
def test_other_sizes_and_shards_are_refused(options: tuple[str, ...], message: str) -> None:
    """Shards of one run have one size; sizes are whole numbers from 1, or `auto`."""
    result = treeopt(*COMMON, *options, status=2)
    assert message in " ".join(result.stderr.split())
    assert not list(Path().iterdir())
