"""What code is generated for: targets, and what a pass may know of one."""

from __future__ import annotations

from dataclasses import dataclass

from stepdown.models.errors import OptionError


@dataclass(frozen=True)
class Target:
    """A target by name and the implementation that its lowering gives every operator."""

    name: str
    implementation: str


TARGETS: dict[str, Target] = {"cpu": Target("cpu", "cpu")}
"""Every supported target by name."""


def find_target(name: str | Target) -> Target:
    """The target called ``name``.

    :raises OptionError: when there is none.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str) or name not in TARGETS:
        accepted = ", ".join(f'"{known}"' for known in TARGETS)
        raise OptionError(f'target "{name}" is unknown; accepted are {accepted}.')
    return TARGETS[name]
