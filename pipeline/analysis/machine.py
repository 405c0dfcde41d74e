"""Machines to judge an operator by, and measured times of operators.

A machine is two peaks: bytes a second between its memory and its processor, and floating-point operations a second.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepdown.models.errors import OptionError
from stepdown.pipeline.build_folder import DIRECTIONS


@dataclass(frozen=True)
class Machine:
    """A machine's peaks.

    :ivar bandwidth: bytes a second.
    :ivar flop_rate: flop a second.
    """

    name: str
    bandwidth: float
    flop_rate: float

    @property
    def balance(self) -> float:
        """Flop for each byte below which memory is the limit."""
        return self.flop_rate / self.bandwidth

    def least_seconds(self, flop: float, moved: float) -> float:
        """What so much work takes at the least, computing and moving at the same time."""
        return max(flop / self.flop_rate, moved / self.bandwidth)


MACHINES = {
    "v100": Machine("NVIDIA V100-SXM2, float16 in tensor cores", 900e9, 125e12),
    "h200": Machine("NVIDIA H200, bfloat16 in tensor cores", 4.8e12, 989e12),
}
"""Peaks from data sheets. The V100 is the paper's machine."""

DEFAULT_MACHINE = "h200"


def find_machine(name: str) -> Machine:
    """The machine of that name.

    :raises OptionError: naming the known ones.
    """
    if name not in MACHINES:
        accepted = ", ".join(f'"{known}"' for known in MACHINES)
        raise OptionError(f'machine "{name}" is unknown; accepted are {accepted}.')
    return MACHINES[name]


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of operators by direction and name, and the machine that they were measured on."""

    machine: Machine
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, direction: str, name: str) -> float | None:
        """Seconds of one operator; None where it was not measured."""
        return self.seconds.get(direction, {}).get(name)


def read_times(path: Path) -> MeasuredTimes:
    """The times in a JSON file.

    It holds ``machine``, the name of a known one or an object with ``name``, ``bandwidth`` (bytes a second) and
    ``flop_rate`` (flop a second), and ``forward`` and ``backward``, each an object of operators' names and seconds.

    :raises OptionError: when it holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f'"{path}" cannot be read: {error.strerror}.') from error
    except ValueError as error:
        raise OptionError(f'"{path}" is not JSON: {error}.') from error
    if not isinstance(content, dict) or "machine" not in content or set(content) - {"machine", *DIRECTIONS}:
        raise OptionError(f'"{path}" holds no times; accepted is an object of "machine", "forward" and "backward".')
    seconds: dict[str, dict[str, float]] = {name: _seconds(path, content.get(name, {})) for name in DIRECTIONS}
    return MeasuredTimes(_machine(path, content["machine"]), seconds)


def _machine(path: Path, value: Any) -> Machine:
    if isinstance(value, str):
        return find_machine(value)
    if not isinstance(value, dict) or set(value) != {"name", "bandwidth", "flop_rate"}:
        raise OptionError(
            f'"machine" in "{path}" is {value!r}; accepted are a name, or an object of "name", "bandwidth" and '
            f'"flop_rate".'
        )
    peaks = {name: _positive(path, name, value[name]) for name in ("bandwidth", "flop_rate")}
    return Machine(str(value["name"]), **peaks)


def _seconds(path: Path, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise OptionError(f'"{path}" has {value!r} in place of an object of operators\' names and seconds.')
    return {name: _positive(path, name, seconds) for name, seconds in value.items()}


def _positive(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise OptionError(f'"{name}" in "{path}" is {value!r}; accepted is a positive number.')
    return float(value)
