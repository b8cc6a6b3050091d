"""Seconds of a step: the slower of computing and moving, for each operator, and their sum.

    seconds = sum over operators of max(FLOPs / (c P), bytes / (m B)) + calls x launch + step
              (+ tree, in steps of more than one node) (+ drafting on the host)

P is the device's peak FLOP/s, B its bandwidth. The efficiency c, m, launch, step and tree is 1, 1, 0, 0, 0 in the bare
formulas (arXiv:2401.10774, appendix G); `treeopt.plan.fit` finds it from measured steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeopt.defaults import ONE_NODE
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.plan.devices import Device
from treeopt.plan.operators import Floats, Operator, StepSetting, drafting_operators, forward_operators
from treeopt.shape import MOST_SECONDS, Drafting, ModelShape, shape_error

MOST_NODES = 1 << 20  # of a modelled tree
_SHARES = (1e-6, 1e6)  # of peak figures that may be typed in any order of magnitude
MOST_TOKENS = 1 << 32  # of a batch, and of a context


@dataclass(frozen=True)
class Efficiency:
    """What a device reaches of its peak figures; and the time of a step that is spent otherwise.

    Args:
        compute: share of the peak FLOP/s, above 0; above 1 where the device's figures are too small.
        bandwidth: share of the bandwidth, likewise.
        launch: seconds for each operator of each layer.
        step: seconds for each step.
        tree: seconds for each step of more than one node, besides drafting.

    Raises:
        TreeoptError: E240 for shares outside 1e-6 to 1e6, and for seconds that are negative or more than a day.
    """

    compute: float = 1.0
    bandwidth: float = 1.0
    launch: float = 0.0
    step: float = 0.0
    tree: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low, high = _SHARES if name in ("compute", "bandwidth") else (0.0, MOST_SECONDS)
            if not low <= value <= high:
                raise shape_error(f"efficiency {name} is {value!r}, not a number from {low:g} to {high:g}")


@dataclass(frozen=True)
class StepModel:
    """Step times of a model on a device.

    Args:
        shape: of the model.
        device: with its peak figures.
        setting: dtypes and attention.
        drafting: of steps of more than one node.
        efficiency: of the device.
    """

    shape: ModelShape
    device: Device
    setting: StepSetting = field(default_factory=StepSetting)
    drafting: Drafting = field(default_factory=Drafting)
    efficiency: Efficiency = field(default_factory=Efficiency)

    def operators(self, nodes: Sequence[int] | Floats, batch: int, context: int) -> list[Operator]:
        """The operators of a step of each number of nodes; of one node: autoregressive decoding."""
        sizes = np.asarray(nodes, np.float64)
        forward = forward_operators(self.shape, sizes, batch, context, self.setting)
        return forward + drafting_operators(self.shape, self.drafting, sizes, batch, context, self.setting)

    def seconds(self, nodes: Sequence[int] | Floats, batch: int, context: int) -> Floats:
        """float64 [n]: seconds of a step of each number of nodes, root counted.

        Args:
            nodes: N, at least 1.
            batch: texts decoded together.
            context: tokens in the cache of each text.

        Raises:
            TreeoptError: E240 for numbers below 1 or too large.
        """
        sizes = np.asarray(nodes, np.float64)
        check_steps(sizes, [batch], [context])
        drafted = (sizes > ONE_NODE) * (self.drafting.host_seconds + self.efficiency.tree)
        operators = (self.seconds_of(one) for one in self.operators(sizes, batch, context))
        return sum(operators, np.zeros(1)) + self.efficiency.step + drafted

    def seconds_of(self, operator: Operator) -> Floats:
        """float64 [n]: seconds of one operator."""
        computing, moving = self.times(operator)
        return np.maximum(computing, moving) + operator.calls * self.efficiency.launch

    def times(self, operator: Operator) -> tuple[Floats, Floats]:
        """Seconds of computing and of moving, each float64 [n]; an operator takes the longer."""
        peak = self.device.peak(operator.dtype) * self.efficiency.compute
        return operator.flops / peak, operator.bytes / (self.device.bandwidth * self.efficiency.bandwidth)

    def memory(self, nodes: int, batch: int, context: int) -> float:
        """Bytes of all weights and of the key-value cache, which in windowed layers is a window long."""
        drafting, setting = self.drafting, self.setting
        weights, attention = self.shape.parameters, self.shape.attention
        head = drafting.blocks * self.shape.hidden + (drafting.head_rows or 0)
        weights += drafting.heads * head * self.shape.hidden
        if drafting.draft is not None:
            weights, attention = weights + drafting.draft.parameters, attention + drafting.draft.attention
        cached = sum(one.cached_values * (one.seen(context) + nodes) for one in attention)
        return setting.weight_bytes * weights + setting.kv_bytes * batch * cached

    def profile(
        self, nodes: Iterable[int], batches: Iterable[int], contexts: Iterable[int], provenance: Mapping[str, Any]
    ) -> LatencyProfile:
        """The modelled steps as a latency profile, with those of one and two nodes."""
        sizes = sorted({ONE_NODE, 2, *nodes})
        points = [
            LatencyPoint(size, batch, context, float(value), float(value), float(value))
            for batch in sorted(set(batches))
            for context in sorted(set(contexts))
            for size, value in zip(sizes, self.seconds(sizes, batch, context), strict=True)
        ]
        return LatencyProfile.from_points(points, provenance)


def check_steps(nodes: Floats, batches: Iterable[int], contexts: Iterable[int]) -> None:
    """Raise E240 where a number is missing, below 1 or too large."""
    for name, numbers, most in (
        ("nodes", list(nodes), MOST_NODES),
        ("batch", list(batches), MOST_TOKENS),
        ("context", list(contexts), MOST_TOKENS),
    ):
        faults = [number for number in numbers if not 1 <= number <= most or number != int(number)]
        if faults or not numbers:
            shown = f"{faults[0]:.15g}" if faults else "missing"
            raise shape_error(f"{name} is {shown}, not a whole number from 1 to {most:,}", fix=f"--{name} 1,2,4")
