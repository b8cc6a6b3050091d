"""The habits of the project: hooks, changelog, and the files that CONTRIBUTING.md names."""

from __future__ import annotations

import re

import yaml
from conftest import ROOT_FOLDER

from treeopt.errors import Code


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    makefile = (ROOT_FOLDER / "Makefile").read_text()
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert match is not None
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def test_hooks_are_the_commands_of_lint() -> None:
    """pre-commit runs the commands of `make lint`, in order, on the whole repository, and downloads nothing."""
    (repository,) = yaml.safe_load((ROOT_FOLDER / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == recipe("lint")
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repository["hooks"])


def test_files_that_contributing_names_exist() -> None:
    """Every path in CONTRIBUTING.md is a file or folder."""
    text = (ROOT_FOLDER / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"\b((?:treeopt|tests|docs|bench)/[\w./]*\w)", text))
    assert len(named) > 25
    assert {path for path in named if "NAME" not in path and not (ROOT_FOLDER / path).exists()} == set()


def test_numbers_of_errors_are_of_their_hundreds() -> None:
    """CONTRIBUTING.md says what the hundreds of error numbers mean; every number is one of them."""
    (listed,) = re.findall(r"E1xx.*?decoding\.", (ROOT_FOLDER / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    hundreds = set(re.findall(r"E(\d)xx", listed))
    assert {code.number[1] for code in Code} == hundreds


def test_changelog_keeps_its_form() -> None:
    """The newest section is Unreleased or a version with a date, and its parts are those of Keep a Changelog."""
    text = (ROOT_FOLDER / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert sections[0] == "Unreleased" or re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", sections[0])
    assert "keepachangelog.com" in text
    newest = text.split("\n## ")[1]
    parts = re.findall(r"^### (.*)$", newest, flags=re.MULTILINE)
    assert set(parts) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert len(parts) == len(set(parts))
