"""The bundled data: `trees/` and `calibration/` (in the wheel or beside the package), and the built-in models."""

from pathlib import Path

from treeopt.errors import Code, TreeoptError

POCKET = "pocket"  # name of the built-in model, its heads and its prompts
POCKET_DRAFT = "pocket-draft"  # name of its draft model
POCKET_EAGLE3 = "pocket-eagle3"  # name of its EAGLE-3 head
_KINDS = ("trees", "calibration")


def data_root(kind: str) -> Path:
    """The folder of one kind of data, `trees` or `calibration`."""
    assert kind in _KINDS
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise TreeoptError(Code.FILE_MISSING, f"the installed treeopt lacks its {kind} folder", fix="install treeopt again")


def zoo() -> dict[str, Path]:
    """The bundled trees by name."""
    return {path.stem: path for path in sorted(data_root("trees").glob("*.yaml"))}


def prompt_sets() -> dict[str, Path]:
    """The files of named prompt sets: the description of a set on the hub (.yaml), or prompts (.jsonl)."""
    named = {path.stem: path for path in (data_root("calibration") / "prompts").glob("*.yaml")}
    return dict(sorted({**named, POCKET: pocket() / "prompts.jsonl"}.items()))


def pocket() -> Path:
    """The folder of the built-in model: the base, its heads in `heads/`, and prompts that it was not trained on."""
    return _built_in(POCKET)


def model_folder(name: str) -> Path | None:
    """The folder of the built-in model of this name, if there is one."""
    return _built_in(name) if name in (POCKET, POCKET_DRAFT, POCKET_EAGLE3) else None


def tokenizer_of(folder: Path) -> Path:
    """The folder of the tokenizer of a model's folder: the model's own, but that of `pocket` for its draft model."""
    return pocket() if folder.resolve() == _built_in(POCKET_DRAFT) else folder


def _built_in(name: str) -> Path:
    return Path(__file__).resolve().parents[1] / "data" / name
