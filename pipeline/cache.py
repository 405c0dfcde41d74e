"""The build cache: folders found again by the content they were made from.

Layout under the root (``$STEPDOWN_CACHE``, or the user's cache folder)::

    entries/<key>/     a complete entry; ``files.json`` in it lists size and SHA-256 of every file
    building/<key>-*/  an entry in the making, renamed into place when it is complete
    locks/<key>.lock   held by the one process that builds the entry or removes it
    dace/              DaCe's own helper files

A folder under ``entries`` is complete by construction: it gets there by one rename. A killed builder leaves a folder
under ``building`` that nothing reads; its lock goes with the process, and the next builder removes the folder.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock
import platformdirs

import stepdown
import stepdown.models
import stepdown.pipeline
import stepdown.transformations
from stepdown.models.errors import CacheError, OptionError, StepdownError

FILES = "files.json"
FORMAT = 1
SOURCE_SUFFIXES = frozenset({".py", ".h", ".hpp"})

# Files up to this size, and libraries of any size, are read in full each time an entry is opened.
_SMALL = 64 * 1024
_LIBRARIES = frozenset({".so"})
_KEY = re.compile(r"[0-9A-Za-z_.-]{1,128}")

_log = logging.getLogger(__name__)


class DamagedEntry(CacheError):
    """An entry whose files are not those that were written; :meth:`BuildCache.entry` builds it again."""


@dataclass(frozen=True)
class CacheEntry:
    """One complete entry: ``size`` in bytes, times in UTC, ``description`` from its ``manifest.json``."""

    key: str
    path: Path
    size: int
    created: datetime
    last_used: datetime
    description: str


def default_root() -> Path:
    """``$STEPDOWN_CACHE`` or, without that variable, the user's cache folder."""
    return Path(os.environ.get("STEPDOWN_CACHE") or platformdirs.user_cache_dir("stepdown")).expanduser()


def content_key(**parts: Any) -> str:
    """The SHA-256 (hex) of the canonical JSON of ``parts``: keys sorted, no spaces, NaN refused.

    :raises TypeError: for what JSON cannot express; a key must not depend on how an object happens to print.
    :raises ValueError: for NaN and infinities.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """The SHA-256 (hex) of Stepdown's own sources as installed, so that a changed pass never meets an older build.

    Read once per process: what is imported later is what was there at the start.
    """
    digest = hashlib.sha256()
    packages = (stepdown, stepdown.models, stepdown.transformations, stepdown.pipeline)
    for package in packages:
        base = Path(package.__path__[0])
        # The root package may or may not hold the others as folders, depending on how it is installed.
        found = base.glob("*") if package is stepdown else base.rglob("*")
        for file in sorted(path for path in found if path.suffix in SOURCE_SUFFIXES and path.is_file()):
            digest.update(f"{package.__name__}/{file.relative_to(base).as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class BuildCache:
    """Folders by key, each built once. Safe with several processes and threads; see :meth:`entry`.

    :param root: the cache's folder; ``None`` takes :func:`default_root`. It is made when something is built.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root).expanduser() if root is not None else default_root()

    def __repr__(self) -> str:
        return f"BuildCache({str(self.root)!r})"

    @property
    def _entries(self) -> Path:
        return self.root / "entries"

    @property
    def _building(self) -> Path:
        return self.root / "building"

    @property
    def _locks(self) -> Path:
        return self.root / "locks"

    def entry(self, key: str, build: Callable[[Path], None], check: Callable[[Path], None] | None = None) -> Path:
        """The folder of the complete entry ``key``, built now if it is not there, is damaged or fails ``check``.

        While one process builds, others that ask for the same key wait and then use what it built. An entry that is
        there needs no write access.

        :param key: letters, digits, ``_``, ``.`` and ``-``; usually from :func:`content_key`.
        :param build: fills the empty folder that it is given. What it raises is passed on, and nothing is kept.
        :param check: raises when the folder cannot be used: on a new entry that is passed on, an old one is rebuilt.
        :raises CacheError: when the cache's folder cannot be written.
        :raises OptionError: for an impossible key.
        """
        self._require_key(key)
        final = self._entries / key
        if self._usable(final, check):
            return final
        with self._lock(key):
            if self._usable(final, check):  # another process built it meanwhile
                return final
            self._sweep(key)
            self._build(key, final, build, check)
        return final

    def list(self) -> tuple[CacheEntry, ...]:
        """The complete entries, the last used first."""
        try:
            folders = [path for path in self._entries.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._unusable("read", error) from error
        entries = [entry for entry in map(_read_entry, folders) if entry is not None]
        return tuple(sorted(entries, key=lambda entry: (entry.last_used, entry.key), reverse=True))

    def find(self, prefix: str) -> CacheEntry:
        """The one entry whose key begins with ``prefix``.

        :raises OptionError: when none or several do.
        """
        found = [entry for entry in self.list() if entry.key.startswith(prefix)]
        if not prefix or len(found) != 1:
            number = f"{len(found)} entries" if found else "no entry"
            raise OptionError(
                f'The key prefix "{prefix}" stands for {number} of the cache "{self.root}"; the first characters of '
                f"exactly one key are accepted."
            )
        return found[0]

    def remove(self, prefix: str) -> CacheEntry:
        """Removes the one entry whose key begins with ``prefix`` and returns what it was.

        :raises OptionError: when none or several do.
        :raises CacheError: when it cannot be removed.
        """
        entry = self.find(prefix)
        with self._lock(entry.key):
            self._discard(entry.path)
        return entry

    def clear(self) -> tuple[CacheEntry, ...]:
        """Removes every entry, what killed builds left, and DaCe's helper files; returns the entries removed.

        Builds that run meanwhile go on and appear when they are complete.
        """
        entries = self.list()
        if not self.root.is_dir():
            return entries
        for folder in list(self._entries.glob("*")):
            with self._lock(folder.name):
                self._discard(folder)
        self._sweep()
        shutil.rmtree(self.root / "dace", ignore_errors=True)
        return entries

    def verify(self, path: Path) -> None:
        """Compares an entry's files with its ``files.json``: every size, and the content of libraries and small files.

        :raises DamagedEntry: naming the first file that differs.
        """
        for name, (size, digest) in _read_listing(path).items():
            file = path / name
            try:
                actual = file.stat().st_size
                same = actual == size and (not _hashed(file, size) or _sha256(file) == digest)
            except OSError as error:
                raise DamagedEntry(f'The file "{file}" of the build cache is missing: {error.strerror}.') from error
            if not same:
                raise DamagedEntry(f'The file "{file}" of the build cache is not the one that was written.')

    def _usable(self, final: Path, check: Callable[[Path], None] | None) -> bool:
        if not final.is_dir():
            return False
        try:
            self.verify(final)
            if check is not None:
                check(final)
        except (StepdownError, OSError, ValueError, KeyError) as error:
            _log.warning("%s cannot be used and is built again: %s", final, error)
            return False
        with contextlib.suppress(OSError):  # a cache that cannot be written is still good to read
            os.utime(final / FILES)
        return True

    def _build(
        self, key: str, final: Path, build: Callable[[Path], None], check: Callable[[Path], None] | None
    ) -> None:
        try:
            self._building.mkdir(parents=True, exist_ok=True)
            self._entries.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._building))
            work.chmod(0o777 & ~_umask())
        except OSError as error:
            raise self._unusable("written", error) from error
        try:
            build(work)
            if check is not None:
                check(work)
            self._publish(work, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _publish(self, work: Path, final: Path) -> None:
        try:
            _write_listing(work)
            if final.exists():
                self._discard(final)
            work.rename(final)
        except OSError as error:
            raise self._unusable("written", error) from error

    def _discard(self, folder: Path) -> None:
        """Takes an entry out by one rename, then deletes it; a library that is loaded elsewhere stays loaded."""
        try:
            self._building.mkdir(parents=True, exist_ok=True)
            grave = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=self._building))
            with contextlib.suppress(FileNotFoundError):
                folder.rename(grave / "removed")
        except OSError as error:
            raise self._unusable("written", error) from error
        shutil.rmtree(grave, ignore_errors=True)

    def _sweep(self, held: str | None = None) -> None:
        """Removes what killed builders left. A folder is theirs when nobody holds its lock, or this process does.

        :param held: the key whose lock the caller holds.
        """
        for folder in list(self._building.glob("*")):
            key = folder.name.rpartition("-")[0]
            if key == held:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            lock = filelock.FileLock(self._locks / f"{key}.lock", timeout=0)
            with contextlib.suppress(filelock.Timeout, OSError), lock:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self._locks / f"{key}.lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                _log.info("waiting for another process that holds %s", lock.lock_file)
                lock.acquire(poll_interval=0.05)
        except OSError as error:
            raise self._unusable("written", error) from error
        try:
            yield
        finally:
            lock.release()

    def _unusable(self, action: str, error: OSError) -> CacheError:
        return CacheError(
            error.errno or errno.EIO,
            f'The build cache "{self.root}" cannot be {action} ({error.strerror or error}); set "STEPDOWN_CACHE" to a '
            f"folder that can.",
        )

    @staticmethod
    def _require_key(key: str) -> None:
        if not _KEY.fullmatch(key) or key.startswith("."):
            raise OptionError(
                f'The cache key "{key}" is impossible; 1 to 128 letters, digits, "_", "." and "-" are accepted, the '
                f"first not a point."
            )


def _umask() -> int:
    """The process's umask. It can only be read by setting it; 0o077 in between is safe for other threads."""
    current = os.umask(0o077)
    os.umask(current)
    return current


def _hashed(file: Path, size: int) -> bool:
    return size <= _SMALL or file.suffix in _LIBRARIES


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_listing(folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILES
    }
    listing = {"format": FORMAT, "created": datetime.now(UTC).isoformat(timespec="seconds"), "files": files}
    (folder / FILES).write_text(json.dumps(listing, indent=1))


def _load_listing(folder: Path) -> dict[str, Any]:
    """``files.json`` as an object.

    :raises DamagedEntry: when it is missing, is not JSON or has another format.
    """
    try:
        listing = json.loads((folder / FILES).read_text())
        if listing["format"] != FORMAT:
            raise ValueError(f"format {listing['format']} is not {FORMAT}")
        return listing
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedEntry(
            f'The list of files of the build cache\'s entry "{folder}" cannot be read: {error}.'
        ) from error


def _read_listing(folder: Path) -> dict[str, tuple[int, str]]:
    try:
        return {name: (file["size"], file["sha256"]) for name, file in _load_listing(folder)["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedEntry(f'The list of files of the build cache\'s entry "{folder}" lacks {error}.') from error


def _read_entry(folder: Path) -> CacheEntry | None:
    """What is known of an entry; ``None`` when it is damaged or has just been removed."""
    try:
        created = datetime.fromisoformat(_load_listing(folder)["created"])
        used = datetime.fromtimestamp((folder / FILES).stat().st_mtime, UTC)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except (OSError, KeyError, ValueError, TypeError):
        return None
    return CacheEntry(folder.name, folder, size, created, used, _describe(folder / "manifest.json"))


def _describe(manifest: Path) -> str:
    """One line from a manifest: its ``description``, or its layer and options; empty when there is none."""
    try:
        content = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return ""
    if not isinstance(content, dict):
        return ""
    if "description" in content:
        return str(content["description"])
    layer, options = content.get("layer", {}), content.get("options", {})
    if not isinstance(layer, dict) or not isinstance(options, dict):
        return ""
    words = [str(layer.get("type", "")).replace("_", " ")]
    words += [f"{name}={value}" for name, value in layer.items() if name != "type"]
    words += [f"{name}={'any' if value is None else value}" for name, value in options.items() if value not in ([], "")]
    return " ".join(word for word in words if word)
