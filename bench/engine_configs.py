"""Our settings, given to the engines' own configuration code: accepted or refused, method by method.

    python bench/engine_configs.py [--vllm FOLDER] [--sglang FOLDER] [--llamacpp FOLDER]

A folder is that of an unpacked package (`pip download vllm --no-deps`, and unzip), or that of llama.cpp's sources. Of
vLLM, SpeculativeConfig and the check of its table run as they are, with stand-ins for what they import, so that neither
a GPU nor the package's dependencies are needed: a drafter's config is a stand-in too. Of SGLang the reader of the
adaptive file runs, and the options are looked up in its fields; of llama.cpp the options and kinds are looked up in its
sources. transformers is installed. Beside that, readers written from the engines' rules (tests/engine_settings.py)
check every setting, and TensorRT-LLM's by them alone: its package needs CUDA's libraries on import.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from timing import add_tiny, judged, machine

from treeopt.engines import SETTINGS
from treeopt.export.lint import DraftConfig
from treeopt.export.settings import SYNTHETIC, EngineSettings, engine_settings
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.chains import MeasuredAcceptance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from engine_settings import READERS, read_adaptive

COUNTED = MeasuredAcceptance(2.5, (3000, 2500, 2000, 1500, 1000))
COSTS = {1: 0.05, 8: 0.4, 64: 3.0}  # of a draft, by batch
PROFILE = LatencyProfile.from_points(
    LatencyPoint(nodes, batch, 512, *[1 + cost * (nodes - 1)] * 3)
    for batch, cost in COSTS.items()
    for nodes in range(1, 6)
)
OWN = {
    "vllm": "its own code",
    "sglang": "its names of options and reader of the adaptive file, and a reader of its rules",
    "llamacpp": "its names of options and kinds, and a reader of its rules",
    "transformers": "its own code",
}
Check = Callable[[str, EngineSettings], None]  # raises where the engine refuses


class StandIn(types.ModuleType):
    """A module that has every name: a class that takes anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *given, **named: None})


def stand_ins(package: str, folder: Path, given: dict[str, dict[str, Any]]) -> None:
    """Make modules of a package: those with files are its own, the `given` ones are stand-ins with these names."""
    for name in {part for one in given for part in _above(one)} | {package}:
        module = StandIn(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        module.__dict__.update(given.get(name, {}))
        sys.modules[name] = module


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class Drafter:
    """A stand-in for vLLM's ModelConfig of a target or a drafter, of a type and with `n_predict` modules."""

    model_type: str = "llama"
    n_predict: int | None = None

    def __init__(self, model: str = "target", **_named: Any) -> None:
        self.model, self.model_weights, self.max_model_len = model, "", 4096
        fields = {"model_type": self.model_type, "n_predict": self.n_predict, "architectures": ["X"]}
        self.hf_config = self.hf_text_config = types.SimpleNamespace(**fields)
        self.architectures, self.hf_overrides, self.quantization = ["X"], None, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: False if name.startswith("using") else 512

    def verify_with_parallel_config(self, *_given: object) -> None:
        """All of them fit."""


def vllm_modules(folder: Path) -> tuple[Any, Any]:
    """SpeculativeConfig of vLLM, and the module of its table of lengths."""
    from pydantic import ConfigDict
    from pydantic.dataclasses import dataclass

    def config(cls: type | None = None, **_named: Any) -> Any:
        made = dataclass(config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
        return made if cls is None else made(cls)

    def logger(*_given: object) -> Any:
        return types.SimpleNamespace(**dict.fromkeys(("warning", "warning_once", "info", "debug"), lambda *_: None))

    eagle = {"EAGLEConfig": types.SimpleNamespace}
    given: dict[str, dict[str, Any]] = {
        "vllm.config": {"LoadConfig": Any},
        "vllm.config.cache": {"CacheDType": Any},
        "vllm.config.kernel": {"MoEBackend": Any},
        "vllm.config.model": {"HfOverrides": Any, "ModelConfig": Drafter},
        "vllm.config.parallel": {"ParallelConfig": types.SimpleNamespace},
        "vllm.config.utils": {"config": config, "replace": dataclasses.replace},
        "vllm.logger": {"init_logger": logger},
        "vllm.transformers_utils.config": {},
        "vllm.transformers_utils.configs.eagle": eagle,
        "vllm.transformers_utils.configs.speculators": {"SpeculatorsConfig": type("SpeculatorsConfig", (), {})},
        "vllm.utils.hashing": {},
        "vllm.utils.import_utils": {
            "has_arctic_inference": lambda: True,
            "LazyLoader": lambda *_: StandIn("quantization"),
        },
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": Any},
    }
    stand_ins("vllm", folder, given)
    speculative = importlib.import_module("vllm.config.speculative")
    table = importlib.import_module("vllm.v1.spec_decode.dynamic.utils")
    cls = speculative.SpeculativeConfig
    for name in ("create_draft_parallel_config", "_verify_and_get_draft_tp", "_maybe_override_draft_max_model_len"):
        setattr(cls, name, staticmethod(lambda *_given, **_named: None))
    cls._maybe_override_draft_max_position_embeddings = staticmethod(lambda *_given: None)
    cls.compose_draft_hf_overrides = staticmethod(lambda *_given: {})
    cls.update_arch_ = lambda self: None
    return cls, table


def vllm(folder: Path) -> Check:
    """SpeculativeConfig of vLLM, made from our JSON."""
    cls, table = vllm_modules(folder)

    def check(method: str, found: EngineSettings) -> None:
        settings = json.loads(found.content)
        needs = SETTINGS["vllm"].methods[method].model
        path = {"model": "drafter"} if needs else {}
        Drafter.model_type = "mtp" if method == "mtp" else "llama"
        made = cls(**settings, **path, target_model_config=Drafter(), target_parallel_config=types.SimpleNamespace())
        if made.method != method or made.num_speculative_tokens != settings["num_speculative_tokens"]:
            raise ValueError(f"vLLM makes it {made.method} with {made.num_speculative_tokens}")
        if made.num_speculative_tokens_per_batch_size is not None:
            lists = [list(row) for row in made.num_speculative_tokens_per_batch_size]
            table.build_dynamic_sd_schedule_lookup(lists, 128, made.num_speculative_tokens)

    return check


def sglang(folder: Path) -> Check:
    """The names of SGLang's options, and its reader of the adaptive file."""
    fields = (folder / "sglang/srt/arg_groups/fields/spec.py").read_text()
    options = {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (speculative_\w+):", fields, re.MULTILINE)}
    names = ("arg_groups.overrides", "runtime_context", "speculative.spec_info", "utils")
    stand_ins("sglang", folder, {f"sglang.srt.{name}": {} for name in names})
    adaptive = importlib.import_module("sglang.srt.speculative.adaptive_spec_params")

    def check(method: str, found: EngineSettings) -> None:
        if unknown := set(found.settings) - options:
            raise ValueError(f"unknown options {unknown}")
        for note in found.notes:
            if "--speculative-adaptive-config" in note:
                text = note.partition("FILE: ")[2]
                with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                    file.write(text)
                    file.flush()
                    steps = adaptive.resolve_candidate_steps_from_config(file.name)
                if found.settings["--speculative-num-steps"] not in steps or not read_adaptive(text):
                    raise ValueError(f"{method}: steps that are not among {steps}")

    return check


def llamacpp(folder: Path) -> Check:
    """The names of llama.cpp's options and kinds of drafts."""
    options = set(re.findall(r'\{"(--spec-[\w-]+)"', (folder / "common/arg.cpp").read_text()))
    kinds = set(re.findall(r'\{"([\w-]+)",\s+COMMON_SPECULATIVE', (folder / "common/speculative.cpp").read_text()))

    def check(method: str, found: EngineSettings) -> None:
        if unknown := set(found.settings) - options:
            raise ValueError(f"unknown options {unknown}")
        if method not in kinds:
            raise ValueError(f"unknown kind {method}")

    return check


def rows(engine: str, method: str) -> Iterator[tuple[str, EngineSettings]]:
    """Settings of one length, of one for each batch, and with synthetic rates."""
    alone = engine_settings(engine, None, drafts=4, measured=COUNTED, method=method)
    yield "one length", alone
    yield "by batch", engine_settings(engine, None, PROFILE, measured=COUNTED, method=method)
    if engine in SYNTHETIC:
        yield "synthetic", alone.synthetic


def spoiled(check: Check) -> Iterator[tuple[str, str]]:
    """Why vLLM refuses settings with one fault each; empty where it does not."""
    good = engine_settings("vllm", None, drafts=4, measured=COUNTED, method="mtp")
    three = engine_settings("vllm", None, PROFILE, measured=COUNTED, method="mtp", draft=DraftConfig("m", 3)).settings
    for name, changed, n_predict in (
        ("none", {}, 2),
        ("none, the fastest of three modules", three, 3),
        ("a length that is no multiple of n_predict", {}, 3),
        (
            "rates of another length",
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
            None,
        ),
        ("rates without their method", {"synthetic_acceptance_rates": [0.5, 0.4, 0.3, 0.2]}, None),
        ("a table from batch 2 on", {"num_speculative_tokens_per_batch_size": [[2, 8, 1]]}, None),
        ("method medusa", {"method": "medusa"}, None),
        ("an unknown setting", {"draft_len": 4}, None),
    ):
        Drafter.n_predict = n_predict
        try:
            check("mtp", dataclasses.replace(good, settings={**good.settings, **changed}))
        except ValueError as error:  # so are pydantic's
            yield name, " ".join(str(error).split())[:200]
        else:
            yield name, ""
    Drafter.n_predict = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for engine in ("vllm", "sglang", "llamacpp"):
        parser.add_argument(f"--{engine}", type=Path, metavar="FOLDER")
    add_tiny(parser)
    options = parser.parse_args()
    print(f"{machine(1)}; settings for {', '.join(READERS)}")
    makers: dict[str, Callable[[Path], Check]] = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}
    refused = asked = 0
    for engine, reader in READERS.items():
        folder = getattr(options, engine, None)
        check = makers[engine](folder.resolve()) if folder else None
        own = OWN[engine] if check or engine == "transformers" else "a reader of its rules alone"
        for method in SETTINGS[engine].methods:
            if (engine, method) == ("vllm", "medusa"):
                print("vllm medusa: vLLM 0.33 has none")
                continue
            for name, found in rows(engine, method):
                asked += 1
                try:
                    reader(found.content, "drafter")
                    if check:
                        check(method, found)
                    verdict = "accepted"
                except Exception as error:  # whatever the engine's code raises
                    refused, verdict = refused + 1, f"REFUSED: {' '.join(str(error).split())[:200]}"
                print(f"{engine} {method}, {name}: {verdict} by {own}: {found.content}", flush=True)
        if engine == "vllm" and check:
            for fault, why in spoiled(check):
                print(f"vllm mtp, fault {fault}: {f'refused: {why}' if why else 'accepted'}, by {own}")
                refused += bool(why) == fault.startswith("none")
    judged("settings that are refused, and faults that are not", refused, 0, f"of {asked}", most=True)


if __name__ == "__main__":
    main()
