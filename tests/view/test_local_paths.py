"""Local paths in what is written to be sent, by hand."""

from __future__ import annotations

from looped import looped

from treeopt.view.report_data import last_name, without_folders


@looped(
    ("text", "expected"),
    [
        ("/models/vicuna 7b", "vicuna 7b"),
        ("/models/vicuna/", "vicuna"),
        ("~/trees/a.yaml", "a.yaml"),
        ("~ann/a.yaml", "a.yaml"),
        ("../data/p.jsonl", "p.jsonl"),
        ("../../data/p.jsonl", "p.jsonl"),
        ("C:\\models\\vicuna", "vicuna"),
        ("--tree=/trees/a.yaml", "--tree=a.yaml"),
        ("/a b=c/t=1.yaml", "t=1.yaml"),
        ("=" * 5000 + "/a/b", "=" * 5000 + "b"),
        ("--tree=/a b=c/t=1.yaml", "--tree=t=1.yaml"),
        ("ngram=/trees/d.safetensors", "ngram=d.safetensors"),
        ("E201: /home/ann/x.yaml is missing", "E201: x.yaml is missing"),
        ("E201: '/home/ann/x.yaml', ../y/z.yaml", "E201: 'x.yaml', z.yaml"),
    ],
)
def test_local_paths_lose_their_folders(text: str, expected: str) -> None:
    """Absolute ones, of Windows too, of a home folder, and those that lead up."""
    assert last_name(text) == expected


@looped(
    "text",
    [
        "lmsys/vicuna-7b-v1.3",
        "runs/a.yaml",
        "./a.yaml",
        "tokens/s",
        "1/2",
        "n/a",
        "https://a.org/b/c",
        "a / b",
        "</p><p>a</p>",
        "",
        "...",
    ],
)
def test_other_text_stays(text: str) -> None:
    """Names of models on a hub, relative paths, units, addresses."""
    assert last_name(text) == text


def test_nested_data() -> None:
    """Keys are names too; commands are taken by the word, and kept values stay."""
    data = {"/a/b": ["/c/d", 1, None, {"kept": "/e/f"}], "command": "treeopt show '/a b/c d' --tree=/x/y"}
    assert without_folders({"command": "it's in /a/b"}, commands=("command",)) == {"command": "it's in b"}
    found = without_folders(data, commands=("command",), kept=("kept",))
    assert found == {"b": ["d", 1, None, {"kept": "/e/f"}], "command": "treeopt show 'c d' --tree=y"}
