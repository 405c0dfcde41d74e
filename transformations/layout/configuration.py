"""Which container lies how: the configuration of ``AssignLayouts``, read from JSON or from a mapping.

.. code-block:: json

    {"about": "anything that readers should know",
     "containers": {"scores": "BHTS", "intermediate": {"order": "USB", "pad": 16}},
     "backward": {"gradient_scores": {"order": "HBST", "pad": {"B": 64, "S": 16}}}}

``containers`` speaks of both graphs; ``forward`` and ``backward`` of one, for containers that the graphs do not share.
An order names the container's logical dimensions from the slowest to the fastest. ``pad`` rounds the strides of the
named dimensions up to a multiple of so many elements; a number alone speaks of the dimension before the fastest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepdown.models.errors import OptionError
from stepdown.transformations.layout.layouts import Layout

ABOUT = "about"
SECTIONS = ("containers", "forward", "backward")


@dataclass(frozen=True)
class LayoutConfiguration:
    """Layouts by container: of both graphs, and of one of them. Containers without one keep the layout they have."""

    containers: Mapping[str, Layout] = field(default_factory=dict)
    forward: Mapping[str, Layout] = field(default_factory=dict)
    backward: Mapping[str, Layout] = field(default_factory=dict)

    def of(self, direction: str) -> dict[str, Layout]:
        """What is wanted in one graph; its own section goes before the common one."""
        return {**self.containers, **(self.forward if direction == "forward" else self.backward)}

    def __bool__(self) -> bool:
        return bool(self.containers or self.forward or self.backward)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON holds it, in one spelling: equal configurations give equal dictionaries."""
        return {
            section: {name: _to_json(layout) for name, layout in sorted(getattr(self, section).items())}
            for section in SECTIONS
            if getattr(self, section)
        }


def read_layouts(source: LayoutConfiguration | Mapping[str, Any] | str | Path | None) -> LayoutConfiguration:
    """The configuration that ``source`` holds: a mapping, or the path of a JSON file; ``None`` is the default.

    :raises OptionError: when the file cannot be read, or its content is no configuration.
    """
    if source is None:
        return LayoutConfiguration()
    if isinstance(source, LayoutConfiguration):
        return source
    where, content = ("", source) if isinstance(source, Mapping) else (f' in "{source}"', _read(source))
    if not isinstance(content, Mapping):
        raise OptionError(f"layouts{where} are {content!r}; accepted is an object with {_names(SECTIONS)}.")
    for key in content:
        if key not in (*SECTIONS, ABOUT):
            raise OptionError(f'layouts{where} have an entry "{key}"; accepted are {_names((*SECTIONS, ABOUT))}.')
    return LayoutConfiguration(**{section: _section(section, content.get(section, {}), where) for section in SECTIONS})


def _read(path: object) -> Any:
    if not isinstance(path, (str, Path)):
        raise OptionError(f"layouts {path!r} were given; accepted are a mapping and the path of a JSON file.")
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f'layouts file "{path}" cannot be read: {error.strerror}.') from error
    except ValueError as error:
        raise OptionError(f'layouts file "{path}" is not JSON: {error}.') from error


def _section(section: str, content: object, where: str) -> dict[str, Layout]:
    if not isinstance(content, Mapping):
        raise OptionError(
            f'"{section}" of the layouts{where} is {content!r}; accepted is an object of container names.'
        )
    found: dict[str, Layout] = {}
    for name, value in content.items():
        try:
            found[str(name)] = _layout(value)
        except OptionError as error:
            raise OptionError(f'layout of container "{name}"{where}: {error}') from None
    return found


def _layout(value: object) -> Layout:
    if isinstance(value, Layout):
        return value
    entry = {"order": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or not isinstance(entry.get("order"), str) or set(entry) - {"order", "pad"}:
        raise OptionError(
            f'{value!r} was given; accepted are an order like "BHTS", or an object with "order" and, if wanted, "pad".'
        )
    order, pad = entry["order"], entry.get("pad", {})
    if not isinstance(pad, Mapping):
        if isinstance(pad, bool) or not isinstance(pad, int):
            raise OptionError(
                f"padding {pad!r} was given; accepted are a whole number, or an object with one for each dimension."
            )
        if len(order) < 2:
            raise OptionError(f'padding {pad} of order "{order}" was given; one dimension alone takes none.')
        pad = {order[-2]: pad}
    layout = Layout(order, tuple((str(letter), multiple) for letter, multiple in pad.items()))
    padded = sorted((item for item in layout.pad if item[1] > 1), key=lambda item: order.index(item[0]))
    return Layout(order, tuple(padded))


def _to_json(layout: Layout) -> dict[str, Any] | str:
    return {"order": layout.order, "pad": dict(layout.pad)} if layout.pad else layout.order


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)
