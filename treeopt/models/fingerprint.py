"""A fingerprint of weights: equal for equal weights on any device, from a few values of each tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from treeopt.models.placement import weight_of

_SAMPLES = 64  # values read of each tensor
_ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)  # precisions in which a base is loaded


@torch.no_grad()
def fingerprint(module: nn.Module, rounding: torch.dtype = torch.float32) -> str:
    """16 hex digits from the name, shape and 64 evenly spaced values of every parameter, rounded to a dtype."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = (weight_of(module, name) if tensor.is_meta else tensor).reshape(-1)
        at = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
        sample = flat[at.to(flat.device)].to(rounding).float().cpu().numpy()
        digest.update(f"{name}{list(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def fingerprints(module: nn.Module) -> dict[str, str]:
    """The fingerprint of the weights rounded to each precision, by its name.

    A model loaded in two precisions has two fingerprints, but one of these is equal.
    """
    return {str(dtype).removeprefix("torch."): fingerprint(module, dtype) for dtype in _ROUNDINGS}
