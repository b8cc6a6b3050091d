"""Damage to valid files, bytewise and in their structure, by a seeded generator; the same seed gives the same file."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy
import yaml

Damage = Callable[[bytes, Random], bytes]
MOST = 1 << 16  # bytes of a damaged file

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 255, 2**31, 2**63, -(2**63) - 1, 2**64, 10**9, 10**400, -(10**400), 0.5, -0.0, -1.5),
    *(1e308, 1e-320, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "0",
        "x" * 3000,
        "\ud800",
        "\0",
        "\u2028",
        "\x1b[31m",
        "../../x.safetensors",
        "/etc/passwd",
        "/dev/zero",
    ),
    *([], {}, [[]], [None], {"": None}, [0] * 300, {str(i): i for i in range(50)}, [[0, 1]], "nan", "1e999"),
)
TOKENS = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"'", b'"', b"{", b"}", b"[" * 40, b"]", b":", b",", b"- "),
    *(b"&a ", b"*a", b"!!python/object/apply:os.system ", b"<<: ", b"# ", b"NaN", b"Infinity", b"1e999", b"9" * 400),
    *(
        b"9" * 5000,
        b"0x" + b"f" * 5000,
        b"-1",
        b"../",
        b"__import__('os')",
        b"\xed\xa0\x80",
        b"null",
        b"true",
        b"(" * 30,
    ),
)


def damage_bytes(raw: bytes, rng: Random) -> bytes:
    """The content with bits flipped, and parts removed, repeated or replaced."""
    made = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(made) + 1)
        end = min(len(made), start + rng.choice((1, 2, 8, 64)))
        match rng.randrange(6):
            case 0 if start < len(made):
                made[start] ^= 1 << rng.randrange(8)
            case 1:
                del made[start:end]
            case 2:
                made[start:start] = made[start:end]
            case 3:
                made[start:start] = rng.choice(TOKENS)
            case 4:
                made[start:end] = rng.choice(TOKENS)
            case 5:
                del made[start:]
    return bytes(made[:MOST])


def damage_value(value: Any, rng: Random) -> Any:
    """The value with one part replaced, removed, repeated, renamed or wrapped."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        made: Any = dict(value) if isinstance(value, dict) else list(value)
        match rng.randrange(8):
            case 0:
                del made[key]
            case 1 if isinstance(made, dict):
                made[rng.choice(("", "schema", "__metadata__", "../x", "\0", f"{key}x"))] = made.pop(key)
            case 1 | 2 if isinstance(made, list):
                made[key:key] = [made[key]] * rng.choice((1, 2, 300))
            case 3 if isinstance(made, list):
                rng.shuffle(made)
            case _:
                made[key] = damage_value(made[key], rng)
        return made
    if type(value) in (int, float) and abs(value) < 1e300 and rng.random() < 0.3:
        return value + rng.choice((-1, 1, 0.5, 2**31, -(2**31)))
    return _nested(rng) if rng.random() < 0.05 else rng.choice(VALUES)


def _nested(rng: Random) -> Any:
    made: Any = 0
    for _ in range(rng.choice((5, 25, 100))):
        made = [made] if rng.random() < 0.5 else {"a": made}
    return made


def _damaged(value: Any, rng: Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = damage_value(value, rng)
    return value


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _encoded(raw: bytes, rng: Random) -> bytes:
    """The text, sometimes in another encoding."""
    chosen = rng.randrange(60)
    if chosen == 0:
        return raw.decode(errors="replace").encode("utf-16")
    return b"\xef\xbb\xbf" + raw if chosen == 1 else raw


def damage_json(raw: bytes, rng: Random) -> bytes:
    """A JSON document, or lines of JSON, with damaged values, at times with a key twice."""
    try:
        made = _text(_damaged(json.loads(raw), rng))
    except ValueError:
        lines = raw.split(b"\n")
        i = rng.randrange(len(lines))
        try:
            lines[i] = _text(_damaged(json.loads(lines[i]), rng))
        except ValueError:
            return damage_bytes(raw, rng)
        made = b"\n".join(lines)
    if rng.random() < 0.05:
        made = made.replace(b"{", b'{"schema": 1, "schema": 2, ', 1)
    return _encoded(made, rng)


def damage_yaml(raw: bytes, rng: Random) -> bytes:
    """A YAML document with damaged values; text of other formats bytewise."""
    try:
        data = yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError):
        return damage_bytes(raw, rng)
    if not isinstance(data, (dict, list)):
        return damage_bytes(raw, rng)
    made = _damaged(data, rng)
    try:
        text = _text(made) if rng.random() < 0.5 else yaml.dump(made, default_flow_style=None).encode(errors="replace")
    except ValueError:  # a number of too many digits
        return damage_bytes(raw, rng)
    return _encoded(text, rng)


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file of any header, at times with a wrong length."""
    text = header if isinstance(header, bytes) else _text(header)
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data


def damage_tensors(raw: bytes, rng: Random) -> bytes:
    """A safetensors file with a damaged header: names, dtypes, shapes, offsets, its length."""
    try:
        header, data = split(raw)
        length = rng.choice((None, None, None, 0, 1, 2**63, 2**64 - 1, 10**8 + 1, len(raw)))
        if rng.random() < 0.5:
            return joined(_damaged(header, rng), data, length)
        name = rng.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        match rng.randrange(6):
            case 0:
                entry["dtype"] = rng.choice(("F64", "F16", "BF16", "I8", "BOOL", "U64", "F8_E4M3", "F4", "C64", "", 5))
            case 1:
                entry["shape"] = rng.choice(([2**32, 2**32], [2**63], [-1], [0], [], [2**64], [1.5], [10**400]))
            case 2:
                entry["data_offsets"] = rng.choice(([0, 0], [0, 2**63], [8, 0], [-1, 4], [1, 5], [2**64, 2**65]))
            case 3:
                header[name + "x"] = dict(entry)
            case 4:
                entry["shape"] = [*entry["shape"][::-1], 1]
            case _:
                del header[name]
        return joined(header, data)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        return damage_bytes(raw, rng)


def damage_arrays(raw: bytes, rng: Random) -> bytes:
    """An array file of treeopt with a damaged header or array, and no checksum, so that its content is looked at."""
    if rng.random() < 0.2:
        return damage_tensors(raw, rng)
    try:
        outer, _ = split(raw)
        header = json.loads(outer["__metadata__"]["treeopt"])
        arrays = safetensors.numpy.load(raw)
    except Exception:  # a file that an earlier step damaged
        return damage_bytes(raw, rng)
    header.pop("sha256", None) if isinstance(header, dict) else None
    for _ in range(rng.choice((0, 1, 1, 2))):
        if arrays:
            _damage_array(arrays, rng)
    if rng.random() < 0.6 or not arrays:
        schema = header.get("schema") if isinstance(header, dict) else None
        header = _damaged(header, rng)
        if isinstance(header, dict) and schema and rng.random() < 0.9:
            header["schema"] = schema
    try:
        return safetensors.numpy.save(arrays, metadata={"treeopt": json.dumps(header)})
    except Exception:  # a type that safetensors does not write
        return raw


def _damage_array(arrays: dict[str, Any], rng: Random) -> None:
    """Change one array in place: a value, its type, its shape, its name; or remove it."""
    name = rng.choice(sorted(arrays))
    array = arrays[name].copy()
    match rng.randrange(7):
        case 0 | 1 | 2 if array.size:
            flat = array.reshape(-1)
            values = (0, 1, -1, 254, 255, 2**31 - 1, -(2**31), 2**63 - 1, float("nan"), float("inf"), -1e4)
            with np.errstate(all="ignore"):
                flat[rng.randrange(flat.size)] = np.asarray(rng.choice(values)).astype(array.dtype)
        case 3:
            with np.errstate(all="ignore"):
                array = array.astype(
                    rng.choice((np.int64, np.int32, np.uint8, np.float16, np.float64, np.bool_, np.int8))
                )
        case 4:
            array = rng.choice((array.reshape(-1), array[None], array[:0], array[..., :0], array[:-1], array.T))
        case 5:
            array = np.concatenate([array, array]) if array.ndim else array
        case _:
            arrays[rng.choice((f"{name}x", "ranks", "num_tokens", "self", ""))] = array
            if rng.random() < 0.5:
                del arrays[name]
            return
    arrays[name] = np.ascontiguousarray(array)


def damage_zip(raw: bytes, rng: Random) -> bytes:
    """A zip with members that are damaged, renamed, repeated, left out or compressed."""
    if rng.random() < 0.3 or not raw.startswith(b"PK"):
        return damage_bytes(raw, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [[info.filename, archive.read(info)] for info in archive.infolist()]
    except Exception:  # of zipfile and zlib, about a file that an earlier step damaged
        return damage_bytes(raw, rng)
    if not members:
        return damage_bytes(raw, rng)
    chosen = rng.choice(members)
    match rng.randrange(6):
        case 0:
            members.remove(chosen)
        case 1:
            chosen[0] = rng.choice(("../x", "/etc/x", "x", "a/data.pkl", "\u2028"))
        case 2:
            chosen[1] = bytes(rng.choice((0, 1, 10_000)))
        case _:
            chosen[1] = damage_bytes(chosen[1], rng)
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return stream.getvalue()
