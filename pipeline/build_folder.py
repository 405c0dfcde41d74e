"""A build as it lies on disk: the folder that the compiler wrote, read again."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepdown.models.errors import OptionError
from stepdown.pipeline.cache import BuildCache

Direction = Literal["forward", "backward"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
FORMAT = 1
MANIFEST = "manifest.json"
_KEY_PREFIX = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True)
class BuildFolder:
    """A build's folder and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The stages that ran, in order."""
        return tuple(stage["name"] for stage in self.manifest["stages"])

    def stage(self, name: str) -> dict[str, Any]:
        """What the manifest says about stage ``name``.

        :raises OptionError: when this build has no such stage.
        """
        for stage in self.manifest["stages"]:
            if stage["name"] == name:
                return stage
        accepted = ", ".join(f'"{known}"' for known in self.stage_names)
        raise OptionError(f'stage "{name}" is unknown in the build "{self.path}"; accepted are {accepted}.')

    def graph_file(self, name: str, direction: Direction) -> Path | None:
        """The saved SDFG of stage ``name``; ``None`` where there is none, as before differentiation."""
        self.stage(name)
        found = sorted((self.path / "stages").glob(f"[0-9]*-{name}.{direction}.sdfgz"))
        return found[0] if found else None


def read_build(path: Path) -> BuildFolder:
    """The build in folder ``path``.

    :raises OptionError: when it is not one.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f'"{path}" is not a build: it has no "{MANIFEST}".') from None
    except (OSError, ValueError) as error:
        raise OptionError(f'"{file}" cannot be read as the manifest of a build: {error}.') from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        given = manifest.get("format") if isinstance(manifest, dict) else None
        raise OptionError(f'"{file}" has format {given!r}; accepted is {FORMAT}.')
    for name, kind in (("layer", dict), ("options", dict), ("stages", list)):
        if not isinstance(manifest.get(name), kind):
            raise OptionError(f'"{file}" has no usable "{name}"; accepted is a manifest that "stepdown compile" wrote.')
    return BuildFolder(path, manifest)


def find_build(build: str, cache: BuildCache | None = None) -> BuildFolder:
    """The build that ``build`` names: a folder, or the first characters of one key in the cache.

    :raises OptionError: when it names neither.
    """
    path = Path(build).expanduser()
    if path.is_dir():
        return read_build(path)
    if _KEY_PREFIX.fullmatch(build):
        return read_build((cache or BuildCache()).find(build).path)
    raise OptionError(f'"{build}" is neither the folder of a build nor the first characters of a key in the cache.')


def known_sizes(manifest: Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> dict[str, int | None]:
    """The sizes `B` and `S`: those the build promises, else those given, else ``None``.

    :raises OptionError: when ``batch`` or ``seq`` is not what the build promises, or not positive.
    """
    sizes: dict[str, int | None] = {}
    for letter, name, given in (("B", "batch", batch), ("S", "seq", seq)):
        promised = manifest["options"].get(name)
        if given is not None and given <= 0:
            raise OptionError(f'"{name}" is {given}; accepted is a positive integer.')
        if promised is not None and given not in (None, promised):
            raise OptionError(f'"{name}" is {given}; this build accepts {promised} only.')
        sizes[letter] = promised if promised is not None else given
    return sizes
