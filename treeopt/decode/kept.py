"""Decoders of `tree_generate`, kept from one call to the next.

A call of `model.generate` has a model, heads, a tree and a drafter, and usually the same as the call before. What is
made from them (the heads in the model's dtype and on its device, a drafter and a tree that were read from files, the
compiled tree, the masks) is kept in a decoder for each model and plan.

- A call takes a decoder away and returns it at its end. Two threads that use one model therefore share no decoder.
- A decoder is used again only while all of these are the same: the model's dtype, device and attention; the heads and
  their weights; the tree, by its value; the drafter; and, by their time and size, the files they were read from.
- A draft model is part of a decoder as an object, with its dtype and device, or by its name; a kept decoder holds it.
  A model that drafts for itself is not kept.
- A decoder holds a weak reference to its model, so a model that is deleted takes its decoders with it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy, Rule
from treeopt.drafter import Drafter
from treeopt.files.policies import load_plan, load_plan_for
from treeopt.files.trees import as_tree
from treeopt.models.base import Base, shown_name
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify.buffers import BUFFER_NAMES, Buffers
from treeopt.verify.probe import check_trees

MOST_KEPT = 4  # decoders of a model; the one that was not used for the longest time is dropped

Given = tuple[Any, Any, Any, Any]  # heads, tree, drafter and draft model, as for `TreeDecoder`
Stamp = tuple[str, tuple[int, int, int] | None]  # a file; its time, size and inode, None where there is no file


class BorrowedBase(Base):
    """A `Base` that does not keep its model alive; whoever uses it holds the model."""

    _model: weakref.ref[PreTrainedModel]

    def __init__(self, model: PreTrainedModel) -> None:
        fields = {"_model": weakref.ref(model), "tokenizer": None, "name": shown_name(model), "notes": ()}
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # the record is frozen

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        found = self._model()
        assert found is not None, "the model was deleted"
        return found


@dataclass(frozen=True)
class _Key:
    """What a decoder was made for.

    Args:
        setting: dtype, device and attention of the model.
        heads: a weak reference to the heads, and the state of their weights.
        tree: the tree's value, its file, or the identity of a compiled tree.
        drafter: the identity of a record, or its file.
        draft: the identity of a draft model, or its name.
    """

    setting: Hashable
    heads: tuple[Any, ...] | None
    tree: Hashable
    drafter: Hashable
    draft: Hashable

    def serves(self, setting: Hashable) -> bool:
        """Whether the model still has this setting, and the heads exist."""
        return self.setting == setting and (self.heads is None or self.heads[0]() is not None)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A decoder that no call uses."""

    key: _Key
    files: tuple[Stamp, ...]
    decoder: TreeDecoder


class _Same:
    """An object, equal to itself alone."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


class _Idle:
    """The decoders of one model that no call uses, the last used one first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []

    def take(self, key: _Key) -> _Kept | None:
        """Remove and return a decoder for this key; those that can serve no call any more are dropped."""
        with self._lock:
            self._kept = [one for one in self._kept if one.key.serves(key.setting)]
            for i, one in enumerate(self._kept):
                if one.key == key:
                    del self._kept[i]
                    return one if all(_stamp(name) == stamp for name, stamp in one.files) else None
        return None

    def put(self, kept: _Kept) -> None:
        """Keep a decoder."""
        with self._lock:
            self._kept = [kept, *self._kept][:MOST_KEPT]


_idle: weakref.WeakKeyDictionary[PreTrainedModel, _Idle] = weakref.WeakKeyDictionary()
_idle_lock = threading.Lock()


@contextmanager
def kept_decoder(model: PreTrainedModel, given: Given, acceptance: Rule) -> Iterator[TreeDecoder]:
    """A decoder for one call: one that an earlier call returned, or a new one.

    Args:
        model: the model.
        given: heads, tree, drafter and draft model, as for `TreeDecoder`. A `Proposer` and a `TreeSource` are objects
            of the user that may hold the model, so their decoders are not kept.
        acceptance: the rule of this call; it is not kept.

    Raises:
        TreeoptError: as `TreeDecoder`.
    """
    heads, tree, drafter, draft = given
    if not isinstance(tree, (str, os.PathLike, Tree, TreePolicy, Buffers, type(None))) and _is_paths(tree):
        tree = as_tree(tree)
    key = _key(model, (heads, tree, drafter, draft))
    if key is None:
        yield TreeDecoder(model, heads, tree, drafter=drafter, draft=draft, acceptance=acceptance)
        return
    with _idle_lock:
        idle = _idle.setdefault(model, _Idle())
    kept = idle.take(key) or _made(model, key, (heads, tree, drafter, draft))
    check_trees(kept.decoder.base)  # a kept decoder's model may be in training mode by now
    kept.decoder.acceptance = acceptance
    yield kept.decoder  # after an error it is not kept
    kept.decoder.acceptance = Greedy()  # the call's rule holds its texts
    idle.put(kept)


def _made(model: PreTrainedModel, key: _Key, given: Given) -> _Kept:
    """A new decoder, and the files that it was read from as they were before."""
    heads, tree, drafter, draft = given
    files = [_stamped(one) for one in (tree, drafter) if isinstance(one, (str, os.PathLike))]
    if isinstance(tree, (str, os.PathLike)) and drafter is None:
        named = load_plan(tree).source.get("drafter")
        files += [_stamped(named)] if named else []
        tree, drafter = load_plan_for(tree)
    decoder = TreeDecoder(BorrowedBase(model), heads, tree, drafter=drafter, draft=draft)
    return _Kept(key, tuple(files), decoder)


def _key(model: PreTrainedModel, given: Given) -> _Key | None:
    """The key of these arguments; None where a decoder is not kept, or refuses them."""
    heads, tree, drafter, draft = given
    known_heads = heads is None or isinstance(heads, nn.Module)
    known_tree = tree is None or isinstance(tree, (str, os.PathLike, Tree, TreePolicy, Buffers))
    known_drafter = drafter is None or isinstance(drafter, (str, os.PathLike, Drafter))
    by_itself = draft is model or getattr(draft, "model", None) is model  # a kept decoder would keep its model alive
    if by_itself or not (isinstance(model, PreTrainedModel) and known_heads and known_tree and known_drafter):
        return None
    by_heads = None if heads is None else (weakref.ref(heads), *map(_state, heads.parameters()))
    by_tree: Hashable = tree
    if isinstance(tree, Buffers):
        tensors = (getattr(tree, name) for name in BUFFER_NAMES)
        by_tree = (_Same(tree), *(_state(one) for one in tensors if isinstance(one, Tensor)))
    elif isinstance(tree, (str, os.PathLike)):
        by_tree = ("file", os.path.abspath(os.fsdecode(tree)))
    by_drafter: Hashable = None if drafter is None else _Same(drafter)
    if isinstance(drafter, (str, os.PathLike)):
        by_drafter = os.path.abspath(os.fsdecode(drafter))
    setting = (model.dtype, model.device, model.config._attn_implementation)
    return _Key(setting, by_heads, by_tree, by_drafter, _draft_key(draft))


def _draft_key(draft: Any) -> Hashable:
    """The key of a draft model: its name, or itself with its dtype and device; None without one."""
    if draft is None or isinstance(draft, (str, os.PathLike)):
        return None if draft is None else os.fsdecode(draft)
    return _Same(draft), getattr(draft, "dtype", None), getattr(draft, "device", None)


def _state(tensor: Tensor) -> Hashable:
    """Equal while a tensor has the same memory, and was not written in place."""
    written = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.device, written


def _is_paths(tree: Any) -> bool:
    """Whether a tree is given as a list of paths, or as another iterable of them."""
    return hasattr(tree, "__iter__") and not hasattr(tree, "draft")


def _stamped(name: str | os.PathLike[str]) -> Stamp:
    path = os.path.abspath(os.fsdecode(name))
    return path, _stamp(path)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Time, size and inode of a file, which a file that is written again does not have."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
