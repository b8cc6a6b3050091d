"""Devices: peak FLOP/s by dtype, memory bandwidth and memory, with the source of the figures.

All FLOP/s are dense (without 2:4 sparsity) and of matrix units, with float32 accumulation where a vendor lists both;
float32 is that of the vector units. Where only a sparse figure is published, its half is the dense one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treeopt.facts import Column, Part, Table
from treeopt.shape import ModelShape, shape_error, similar

# Bytes of a value by dtype. Weights of 4 and 8 bits integers are multiplied in 16 bits.
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
_COMPUTED_IN = {"int8": ("bfloat16", "float16"), "int4": ("bfloat16", "float16"), "bfloat16": ("bfloat16", "float16")}
_LEAST, _MOST = 1.0, 1e21  # FLOP/s, bytes per second and bytes of one device; other numbers are typing errors
_SPEC = "flops=312e12,bandwidth=1935e9"


@dataclass(frozen=True)
class Device:
    """The peak figures of an accelerator.

    Args:
        name: of the device.
        flops: FLOP/s by dtype; the key `any` is of every dtype.
        bandwidth: bytes per second between memory and chip.
        memory: bytes; None where unknown.
        source: where the figures are from.

    Raises:
        TreeoptError: E240 for figures that are below 1 or above 1e21, and without FLOP/s.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        figures = {f"flops of {dtype}": value for dtype, value in self.flops.items()} or {"flops": 0.0}
        figures |= {"bandwidth": self.bandwidth} | ({} if self.memory is None else {"memory": self.memory})
        for name, value in figures.items():
            if not _LEAST <= value <= _MOST:
                raise shape_error(f"{self.name}: {name} is {value:g}, not a number from {_LEAST:g} to {_MOST:g}")

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in a dtype; of weights in integers those of 16 bits.

        Raises:
            TreeoptError: E240 where the device has no figure for it.
        """
        for name in (dtype, *_COMPUTED_IN.get(dtype, ()), "any"):
            if name in self.flops:
                return self.flops[name]
        what = f"{self.name} has no peak FLOP/s for {dtype}"
        fix = f"--dtype {' or '.join(self.flops)}, or --device-spec {_SPEC}"
        raise shape_error(what, why="its source states none", fix=fix)


def _gpu(half: float, single: float, eighth: float | None = None) -> dict[str, float]:
    """Peak TFLOP/s of 16-bit, float32 and perhaps float8 products, in FLOP/s."""
    found = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return found if eighth is None else {**found, "float8": eighth * 1e12}


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (sparse figures halved)"
_L4 = "NVIDIA L4 Tensor Core GPU datasheet (sparse figures halved)"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper v2"
_ADA = "NVIDIA Ada GPU architecture whitepaper"

DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb-pcie", _gpu(312, 19.5), 1555e9, 40e9, _A100),
        Device("a100-40gb-sxm", _gpu(312, 19.5), 1555e9, 40e9, _A100),
        Device("a100-80gb-pcie", _gpu(312, 19.5), 1935e9, 80e9, _A100),
        Device("a100-80gb-sxm", _gpu(312, 19.5), 2039e9, 80e9, _A100),
        Device("a40", _gpu(149.7, 37.4), 696e9, 48e9, "NVIDIA A40 datasheet"),
        Device("a6000", _gpu(154.8, 38.7), 768e9, 48e9, _GA102),
        Device("h100-pcie", _gpu(756.5, 51, 1513), 2000e9, 80e9, _H100),
        Device("h100-sxm", _gpu(989.5, 67, 1979), 3350e9, 80e9, _H100),
        Device("h200", _gpu(989.5, 67, 1979), 4800e9, 141e9, "NVIDIA H200 Tensor Core GPU datasheet (SXM, halved)"),
        Device("l4", _gpu(121, 30.3, 242.5), 300e9, 24e9, _L4),
        Device("l40s", _gpu(362.05, 91.6, 733), 864e9, 48e9, "NVIDIA L40S datasheet"),
        Device("rtx-3090", _gpu(71, 35.6), 936e9, 24e9, _GA102),
        Device("rtx-4090", _gpu(165.2, 82.6, 330.3), 1008e9, 24e9, _ADA),
        Device("mi300x", _gpu(1307.4, 163.4, 2614.9), 5300e9, 192e9, "AMD Instinct MI300X data sheet"),
        Device("trainium2", _gpu(667, 181, 1299), 2900e9, 96 * 2.0**30, "AWS Neuron documentation, Trainium2 chip"),
    )
}


def device_preset(name: str) -> Device:
    """The device of a name in `DEVICES`; in any case.

    Raises:
        TreeoptError: E240 for an unknown name, with similar ones.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        near = similar(name, DEVICES) or list(DEVICES)
        why, fix = "presets are devices with published figures", f"{', '.join(near)}; or --device-spec {_SPEC}"
        raise shape_error(f"no device has the name {name}", at=f"--device-preset {name}", why=why, fix=fix)
    return found


def presets(models: Sequence[ModelShape]) -> Iterator[Part]:
    """These models, and the devices of `DEVICES`."""

    def teraflops(flops: Mapping[str, float]) -> str:
        return " ".join(f"{dtype} {value / 1e12:g}" for dtype, value in flops.items() if dtype != "float16")

    known = (
        Column("model", "name"),
        Column("parameters", "parameters", ","),
        Column("context", "context", key=""),
        Column("config of", "source"),
    )
    yield Table(known, models, "models")
    yield ""
    devices = (
        Column("device", "name"),
        Column("dense TFLOP/s", "flops", teraflops),
        Column("GB/s", "bandwidth", lambda value: f"{value / 1e9:g}"),
        Column("GB", "memory", lambda value: f"{value / 1e9:.0f}"),
        Column("source", "source"),
    )
    yield Table(devices, list(DEVICES.values()), "devices")
    yield "float16 is as bfloat16; int8 and int4 weights are multiplied in 16 bits"


def device_of_spec(spec: str) -> Device:
    """The device of `flops=N,bandwidth=N[,memory=N]`: FLOP/s of every dtype, bytes per second, bytes.

    Raises:
        TreeoptError: E240 for other keys, a key twice, a missing one, and values that are not positive numbers.
    """
    parts = [part.partition("=") for part in spec.split(",")]
    try:
        numbers = {key.strip(): float(value) for key, _, value in parts}
    except ValueError:
        numbers = {}
    if len(numbers) < len(parts) or not {"flops", "bandwidth"} <= numbers.keys() <= {"flops", "bandwidth", "memory"}:
        what = f"{spec!r} is not flops=NUMBER,bandwidth=NUMBER[,memory=NUMBER]"
        raise shape_error(what, at=f"--device-spec {spec}", why="a device has both, each once", fix=_SPEC)
    name = f"flops={numbers['flops']:g},bandwidth={numbers['bandwidth']:g}"
    return Device(name, {"any": numbers["flops"]}, numbers["bandwidth"], numbers.get("memory"), "--device-spec")
