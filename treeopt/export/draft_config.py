"""What the config.json of a served drafter says of the settings that an engine takes for it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.files.read import read_settings

# The number of MTP modules, in the order in which vLLM 0.33 looks (vllm/config/speculative.py); of some models it is
# in the config of the text model.
_MODULES = ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class DraftConfig:
    """Limits of a drafter."""

    name: str  # its folder
    # MTP modules in the checkpoint; a longer chain is a multiple of them in vLLM. None where there are none
    modules: int | None = None
    grounded: bool | None = None  # whether Hydra heads read the drafts before them; None of other drafters

    def allows(self, drafts: int) -> bool:
        """Whether vLLM takes a chain of so many drafts."""
        return self.modules is None or drafts <= self.modules or drafts % self.modules == 0

    def check(self, drafts: int | None) -> None:
        """Raise E105 where vLLM does not take a chain of so many drafts."""
        if drafts is not None and not self.allows(drafts):
            what = f"{self.name} has {self.modules} MTP modules, and the chain {drafts} drafts"
            why = "vLLM takes at most as many, or a multiple of them"
            raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--chain-length {drafts}", why=why)


def read_draft_config(path: str | os.PathLike[str]) -> DraftConfig:
    """The limits in the config.json of a drafter, or in a folder with one; of an MTP module it is that of the base.

    Raises:
        TreeoptError: E201 where there is no such file, E203 where it is no config.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    found = read_settings(file)
    if not isinstance(found, dict):
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not a config.json", why="it holds no names and values")
    text = found.get("text_config")
    parts: list[dict[str, Any]] = [found, *([text] if isinstance(text, dict) else [])]
    numbers = [part[name] for name in _MODULES for part in parts if part.get(name)]
    if numbers and (type(numbers[0]) is not int or numbers[0] < 1):
        what = f"{file} says that there are {numbers[0]!r} MTP modules"
        raise TreeoptError(Code.FILE_INVALID, what, why="it is a whole number from 1")
    hydra = "hydra_num_heads" in found
    grounded = bool(found.get("grounded_heads")) if hydra else None
    return DraftConfig(str(path), numbers[0] if numbers else None, grounded)
