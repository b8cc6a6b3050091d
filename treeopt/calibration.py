"""The calibration record: for each decode position, the rank of the true token among each head's guesses.

Everything else is derived from these traces: hits, trials, accuracies, standard errors, and by replay
(`treeopt.optimize.replay`) the exact number of tokens per step of any tree.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import Code, TreeoptError
from treeopt.traces import MAX_RANKS, MISS, NONE, Ranks, StepTraces, TargetTraces, blocks, joined

_STEPS, _TARGET = "per-step trees", "target probabilities"
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Rank traces of S sequences; P positions in all, for H heads.

    Row i of a sequence is the decode state in which generated token g[i] is the root; `ranks[i, h-1]` is the rank of
    g[i+h] under head h, or `MISS`, or `NONE` where g has no token i+h. A sequence of G tokens has G rows.

    Args:
        ranks: uint8 [P, H].
        offsets: int64 [S+1]; sequence s is rows offsets[s] to offsets[s+1].
        prompt_ids: S strings `<prompt set>:<row>`, ascending; the set is a hash, the row has eight digits.
        token_hashes: S hashes of the generated tokens.
        top_k: K, the number of traced ranks of each head, at most 253; larger ranks are `MISS`.
        provenance: how it was measured.
        steps: traces of per-step trees; None where they were not traced.
        target: the target's probabilities of the candidates; None where the texts were not sampled.

    Raises:
        TreeoptError: E220 where a rule above is broken.
    """

    ranks: Ranks
    offsets: NDArray[np.int64]
    prompt_ids: tuple[str, ...]
    token_hashes: tuple[str, ...]
    top_k: int
    provenance: Provenance
    steps: StepTraces | None = None
    target: TargetTraces | None = None

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise TreeoptError(Code.CALIBRATION_INVALID, f"not a calibration: {fault}")
        self.ranks.setflags(write=False)
        self.offsets.setflags(write=False)

    def _fault(self) -> str:
        sequences = len(self.prompt_ids)
        if self.ranks.dtype != np.uint8 or self.ranks.ndim != 2 or not self.ranks.shape[1]:
            return f"ranks are {self.ranks.dtype} {list(self.ranks.shape)}, not uint8 [P, H]"
        if self.offsets.dtype != np.int64 or self.offsets.shape != (sequences + 1,):
            return f"{sequences} prompts but offsets {self.offsets.dtype} {list(self.offsets.shape)}"
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.ranks) or np.any(np.diff(self.offsets) < 0):
            return "offsets do not run from 0 to the number of positions"
        if len(self.token_hashes) != sequences:
            return f"{sequences} prompts but {len(self.token_hashes)} token hashes"
        if any(a >= b for a, b in zip(self.prompt_ids, self.prompt_ids[1:], strict=False)):
            return "prompt ids are not ascending"
        if not 1 <= self.top_k <= MAX_RANKS:
            return f"top_k is {self.top_k}, not 1 to {MAX_RANKS}"
        for rows in blocks(len(self.ranks)):
            part = self.ranks[rows]
            if np.any((part >= self.top_k) & (part < MISS)):
                return f"a rank is {self.top_k} or more, but top_k is {self.top_k}"
            positions = np.arange(*rows.indices(len(self.ranks)))
            left = self.offsets[np.searchsorted(self.offsets, positions, side="right")] - positions  # itself included
            # Replay stops at the end of each text because exactly the tokens past the end are NONE.
            beyond = np.arange(1, self.num_heads + 1)[None, :] >= left[:, None]
            if not np.array_equal(part == NONE, beyond):
                return "NONE is not exactly at the positions past the end of a text"
        fault = "" if self.steps is None else self.steps.fault(self.ranks)
        return fault or ("" if self.target is None else self.target.fault(self.ranks, self.steps))

    @property
    def num_heads(self) -> int:
        """H."""
        return int(self.ranks.shape[1])

    @property
    def positions(self) -> int:
        """P, the number of generated tokens."""
        return int(self.ranks.shape[0])

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.prompt_ids)

    @property
    def temperature(self) -> float | None:
        """Of the sampling of the texts, 0 where they are greedy; None where they were given or it is not recorded."""
        settings = self.provenance.settings
        if "temperature" in settings:
            return float(settings["temperature"])
        return 0.0 if settings.get("answers") == "greedy" else None

    @functools.cached_property
    def hits(self) -> NDArray[np.int64]:
        """int64 [H, top_k]: how often the true token had rank r under head h."""
        counts = [np.bincount(self.ranks[:, h], minlength=256)[: self.top_k] for h in range(self.num_heads)]
        return _frozen(np.stack(counts).astype(np.int64))

    @functools.cached_property
    def trials(self) -> NDArray[np.int64]:
        """int64 [H]: positions that have a true token for head h; deeper heads have fewer."""
        return _frozen(np.sum(self.ranks != NONE, axis=0, dtype=np.int64))

    @functools.cached_property
    def accuracy(self) -> NDArray[np.float64]:
        """float64 [H, top_k]: share of trials with exactly rank r (top-(r+1) minus top-r; Medusa's a_k^(i))."""
        return _frozen(self.hits / np.maximum(self.trials, 1)[:, None])

    @functools.cached_property
    def distinct(self) -> int:
        """The number of clusters, empty texts left out; intervals and standard errors depend on it."""
        return len({self.clusters[s] for s in np.flatnonzero(np.diff(self.offsets))})

    @functools.cached_property
    def clusters(self) -> tuple[str, ...]:
        """[S]: a hash for each text, one for those that depend on each other: equal texts, and turns of a dialogue."""
        first: dict[str, str] = {}
        texts = zip(self.prompt_ids, self.token_hashes, strict=True)
        return tuple(first.setdefault(prompt.partition(".")[0], tokens) for prompt, tokens in texts)

    def standard_error(self, top_k: int) -> NDArray[np.float64]:
        """float64 [H, top_k]: standard error of `accuracy`, by clusters, because their tokens are dependent.

        That of a ratio estimator: sqrt(S/(S-1) * sum over clusters of (hits - accuracy * trials)^2) / trials, where S
        is their number. NaN below two of them, and where there are no trials.
        """
        errors = np.full((self.num_heads, top_k), np.nan)
        filled = np.flatnonzero(np.diff(self.offsets))  # reduceat would add a row for an empty sequence
        if self.distinct < 2:
            return errors
        starts = self.offsets[filled]
        _, text = np.unique([self.clusters[s] for s in filled], return_inverse=True)

        def by_text(chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
            counts = np.add.reduceat(chosen.astype(np.int64), starts)
            return np.bincount(text, weights=counts).astype(np.float64)

        for h in np.flatnonzero(self.trials):
            trials = by_text(self.ranks[:, h] != NONE)
            for r in range(min(top_k, self.top_k)):
                spread = np.sum((by_text(self.ranks[:, h] == r) - self.accuracy[h, r] * trials) ** 2)
                errors[h, r] = np.sqrt(spread * self.distinct / (self.distinct - 1)) / self.trials[h]
            errors[h, self.top_k :] = 0.0
        return errors

    def check_comparable(self, other: Calibration) -> None:
        """Raise E221 unless both have the same model, heads, drafter, levels, number of ranks and settings.

        Where both have texts, per-step trees are traced in both or in neither, and so is the target.
        """
        sides = [record.provenance.mergeable() for record in (self, other)]
        for side, record in zip(sides, (self, other), strict=True):
            measured = side.pop("settings")
            side |= {"levels": record.num_heads, "ranks": record.top_k}
            side |= {f"settings {name}": value for name, value in measured.items()}
            if self.sequences and other.sequences:
                by_paths = record.steps is not None and record.steps.path_accepted is not None
                side[_STEPS] = "not traced" if record.steps is None else f"traced{' by path tokens' * by_paths}"
                side[_TARGET] = "not traced" if record.target is None else f"of {record.target.ranks} candidates"
        keys = list(dict.fromkeys(key for side in sides for key in side))
        differing = [key for key in keys if sides[0].get(key) != sides[1].get(key)]
        if differing:
            values = {key: [_shown(side[key]) if key in side else "not there" for side in sides] for key in differing}
            same_kind = "one --kind for all, static or dynamic" if differing == [_STEPS] else "the same options for all"
            what = f"the calibrations differ in {', '.join(differing)}"
            at = "\n".join(f"{key}: {one} and {two}" for key, (one, two) in values.items())
            raise TreeoptError(Code.CALIBRATION_MISMATCH, what, at=at, fix=f"treeopt calibrate again, with {same_kind}")

    def merge(self, *others: Calibration) -> Calibration:
        """The texts of all, by prompt id; associative. A prompt in several counts once, with the first one's traces.

        Raises:
            TreeoptError: E221 where `check_comparable` finds a difference, or one prompt has two different traces.
        """
        parts: dict[str, tuple[Calibration, int]] = {}
        records = (self, *others)
        filled = next((record for record in records if record.sequences), self)  # what is traced shows in texts alone
        for record in records:
            for first in (self,) if filled is self else (self, filled):
                first.check_comparable(record)
            for s, prompt in enumerate(record.prompt_ids):
                known, at = parts.setdefault(prompt, (record, s))
                same_tokens = known.token_hashes[at] == record.token_hashes[s]
                if not (same_tokens and np.array_equal(known.sequence(at), record.sequence(s))):
                    what = f"prompt {prompt} has a different trace in each calibration"
                    raise TreeoptError(Code.CALIBRATION_MISMATCH, what)
        provenance = functools.reduce(merged_provenance, (record.provenance for record in records))
        return self._joined([parts[prompt] for prompt in sorted(parts)], provenance)

    def select(self, chosen: Sequence[int] | NDArray[np.int64]) -> Calibration:
        """These sequences (indices, ascending), with unchanged provenance and prompt ids."""
        return self._joined([(self, s) for s in chosen], self.provenance)

    def _joined(self, chosen: Sequence[tuple[Calibration, int]], provenance: Provenance) -> Calibration:
        """These sequences of calibrations like this one."""
        parts = [(record, slice(record.offsets[s], record.offsets[s + 1])) for record, s in chosen]
        rows = [record.ranks[part] for record, part in parts]
        return Calibration(
            ranks=np.concatenate([self.ranks[:0], *rows]),
            offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
            prompt_ids=tuple(record.prompt_ids[s] for record, s in chosen),
            token_hashes=tuple(record.token_hashes[s] for record, s in chosen),
            top_k=self.top_k,
            provenance=provenance,
            steps=joined([None if record.steps is None else record.steps.rows(part) for record, part in parts]),
            target=joined([None if record.target is None else record.target.rows(part) for record, part in parts]),
        )

    def sequence(self, s: int) -> Ranks:
        """uint8 [G, H]: the rows of one sequence."""
        return self.ranks[self.offsets[s] : self.offsets[s + 1]]


def _shown(value: object) -> str:
    """A value of the provenance, for a message."""
    return "none" if value == "" else str(value) if isinstance(value, str) else repr(value)


def _frozen(array: NDArray[T]) -> NDArray[T]:
    """The array, made read-only because the record caches it."""
    array.setflags(write=False)
    return array


_VERSIONS = "made-by"  # the entry of a configuration that may differ among parts of one run


@dataclass(frozen=True)
class Provenance:
    """How a calibration was measured, so that it can be repeated.

    `model_id` and `heads_id` are fingerprints of the weights, `drafter_id` is that of the drafter (empty for the
    `heads` drafter). Calibrations with equal ids and `settings` can be merged. `drafter` is the drafter's file,
    `prompts` has the name of each prompt file by its SHA-256, `made_by` the versions and the device.
    `configuration` are the options of the command, see `treeopt.files.configurations`; empty where none wrote it, and
    where calibrations of different options or prompts were merged.
    """

    model: str
    model_id: str
    heads: str
    heads_id: str
    settings: Mapping[str, Any]
    prompts: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the file, its name
    made_by: Mapping[str, Any] = field(default_factory=dict)
    drafter_id: str = ""
    drafter: str = ""
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def mergeable(self) -> dict[str, Any]:
        """The entries that two calibrations must have in common."""
        ids = {"model_id": self.model_id, "heads_id": self.heads_id, "drafter_id": self.drafter_id}
        return {**ids, "settings": dict(self.settings)}


def merged_provenance(one: Provenance, other: Provenance) -> Provenance:
    """The provenance of a merged calibration; differing values are sorted, so the order of merging is irrelevant."""
    made_by = {
        key: _both(one.made_by.get(key), other.made_by.get(key)) for key in sorted({*one.made_by, *other.made_by})
    }
    names = sorted({*one.prompts.items(), *other.prompts.items()})
    return Provenance(
        model=min(one.model, other.model),
        model_id=one.model_id,
        heads=min(one.heads, other.heads),
        heads_id=one.heads_id,
        settings=one.settings,
        prompts=dict(sorted(dict(reversed(names)).items())),  # one name for each file, the first in order
        made_by=made_by,
        drafter_id=one.drafter_id,
        drafter=min(one.drafter, other.drafter),
        configuration=_common_configuration(one, other),
    )


def _common_configuration(one: Provenance, other: Provenance) -> dict[str, Any]:
    """The options of both, with the versions of both; none where no one command makes the merged calibration again."""
    parts = [dict(each.configuration) for each in (one, other)]
    first, second = (each.pop(_VERSIONS, {}) for each in parts)
    if parts[0] != parts[1] or set(one.prompts) != set(other.prompts):
        return {}
    versions = {key: _both(first.get(key), second.get(key)) for key in sorted({*first, *second})}
    return parts[0] | ({_VERSIONS: versions} if versions else {})


def _both(one: Any, other: Any) -> Any:
    parts = {str(part) for value in (one, other) if value is not None for part in str(value).split(" | ")}
    return one if one == other else " | ".join(sorted(parts))
