"""The build cache: keys, one build per key, damage, killed builders, several processes, folders that cannot be used."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepdown.pipeline.cache as cache_module
from stepdown.models.errors import CacheError, OptionError
from stepdown.pipeline.cache import BuildCache, DamagedEntry, content_key, default_root, sources_digest

LIBRARY = bytes(range(256)) * 1024
"""Larger than what is hashed for being small."""

spawn = multiprocessing.get_context("spawn")


def write_entry(folder: Path) -> None:
    """Builds what a compiled layer leaves: a library in a folder, a manifest, a large file that is no library."""
    (folder / "lib").mkdir()
    (folder / "lib" / "forward.so").write_bytes(LIBRARY)
    (folder / "stage.sdfgz").write_bytes(LIBRARY)
    (folder / "manifest.json").write_text(
        json.dumps({"layer": {"type": "encoder_layer", "embed": 8}, "options": {"batch": None, "dtype": "float32"}})
    )


def writes(name: str, text: str) -> Callable[[Path], None]:
    """A build that writes one file."""

    def build(folder: Path) -> None:
        (folder / name).write_text(text)

    return build


class CountedBuild:
    """Builds as :func:`write_entry` and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        write_entry(folder)


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


def leftovers(cache: BuildCache) -> list[str]:
    return [path.name for path in (cache.root / "building").glob("*")]


# Keys


def test_a_key_depends_on_content_and_not_on_order() -> None:
    key = content_key(layer={"embed": 8, "heads": 2}, options=[1, None])
    assert key == content_key(options=[1, None], layer={"heads": 2, "embed": 8})
    assert len(key) == 64
    others = [
        content_key(layer={"embed": 8, "heads": 2}, options=[1, 0]),
        content_key(layer={"embed": 8, "heads": 2}, options=[1, False]),
        content_key(layer={"embed": 8, "heads": "2"}, options=[1, None]),
        content_key(layer={"embed": 8, "heads": 2, "options": [1, None]}),
    ]
    assert len({key, *others}) == 5


def test_a_key_refuses_what_has_no_canonical_text() -> None:
    with pytest.raises(TypeError):
        content_key(value=object())
    with pytest.raises(ValueError, match="JSON compliant"):
        content_key(value=float("nan"))


@pytest.mark.parametrize("key", ["", "../other", "a/b", ".hidden", "a b", "x" * 129])
def test_a_key_cannot_leave_the_cache(key: str, cache: BuildCache) -> None:
    with pytest.raises(OptionError, match="is impossible"):
        cache.entry(key, write_entry)


def test_the_sources_digest_covers_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sources_digest()
    assert len(digest) == 64
    read: list[str] = []
    original = Path.read_bytes

    def recorded(path: Path) -> bytes:
        read.append(path.as_posix())
        content = original(path)
        return content + b" " if path.name == "cache.py" else content

    monkeypatch.setattr(Path, "read_bytes", recorded)
    changed = sources_digest.__wrapped__()
    endings = ["stepdown/__init__.py", "models/operators/__init__.py", "transformations/lowering/cpu/__init__.py"]
    assert all(any(path.endswith(ending) for path in read) for ending in endings)
    assert len(read) == len(set(read))
    assert changed != digest


# Building and finding again


def test_the_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPDOWN_CACHE", str(tmp_path / "here"))
    assert default_root() == BuildCache().root == tmp_path / "here"
    monkeypatch.delenv("STEPDOWN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "stepdown"


def test_an_entry_is_built_once_and_in_place_only_when_complete(cache: BuildCache) -> None:
    seen: list[Path] = []

    def build(folder: Path) -> None:
        seen.append(folder)
        assert not (cache.root / "entries" / "key").exists()
        write_entry(folder)

    first = cache.entry("key", build)
    assert cache.entry("key", build) == first == cache.root / "entries" / "key"
    assert len(seen) == 1
    assert seen[0].parent == cache.root / "building"
    assert (first / "lib" / "forward.so").read_bytes() == LIBRARY
    assert leftovers(cache) == []


def test_a_failed_build_leaves_nothing(cache: BuildCache) -> None:
    def fail(folder: Path) -> None:
        write_entry(folder)
        raise RuntimeError("the compiler failed")

    with pytest.raises(RuntimeError, match="the compiler failed"):
        cache.entry("key", fail)
    assert cache.list() == ()
    assert leftovers(cache) == []
    assert cache.entry("key", write_entry).is_dir()


def test_the_check_decides_about_new_and_old_entries(cache: BuildCache) -> None:
    def refuse(folder: Path) -> None:
        raise ValueError(f"{(folder / 'manifest.json').is_file()}")

    with pytest.raises(ValueError, match="True"):
        cache.entry("key", write_entry, refuse)
    assert cache.list() == ()

    build = CountedBuild()
    checked: list[Path] = []

    def only_the_second(folder: Path) -> None:
        checked.append(folder)
        if build.calls < 2:
            raise CacheError("another format")

    path = cache.entry("key", build)
    assert cache.entry("key", build, only_the_second) == path
    assert build.calls == 2
    assert checked[-1].parent == cache.root / "building", "a new entry is checked before it gets its place"
    cache.entry("key", build, only_the_second)
    assert build.calls == 2


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("lib/forward.so", truncate),
        ("lib/forward.so", flip),
        ("lib/forward.so", Path.unlink),
        ("stage.sdfgz", truncate),
        ("manifest.json", flip),
        ("files.json", truncate),
        ("files.json", Path.unlink),
        ("files.json", lambda path: path.write_text("[]")),
        ("files.json", lambda path: path.write_text('{"format": 1, "files": {"manifest.json": {}}}')),
        ("files.json", lambda path: path.write_text('{"format": 0, "files": {}}')),
        ("files.json", lambda path: path.write_bytes(b"\xff\xfe")),
    ],
)
def test_a_damaged_entry_is_built_again(name: str, damage: Callable[[Path], Any], cache: BuildCache) -> None:
    build = CountedBuild()
    path = cache.entry("key", build)
    damage(path / name)
    with pytest.raises(DamagedEntry):
        cache.verify(path)
    assert cache.entry("key", build) == path
    assert build.calls == 2
    cache.verify(path)
    assert (path / "lib" / "forward.so").read_bytes() == LIBRARY
    assert leftovers(cache) == []


def test_additional_files_are_no_damage(cache: BuildCache) -> None:
    build = CountedBuild()
    path = cache.entry("key", build)
    (path / "lib" / "__pycache__").mkdir()
    (path / "lib" / "__pycache__" / "x.pyc").write_bytes(b"x")
    cache.entry("key", build)
    assert build.calls == 1


def test_a_file_in_the_place_of_an_entry_is_replaced(cache: BuildCache) -> None:
    (cache.root / "entries").mkdir(parents=True)
    (cache.root / "entries" / "key").write_text("not a folder")
    assert (cache.entry("key", write_entry) / "manifest.json").is_file()


# Several processes and threads


def build_slowly(root: str, log: str, started: Any) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as stream:
            stream.write(f"{os.getpid()}\n")
        started.set()
        time.sleep(0.5)
        write_entry(folder)

    path = BuildCache(root).entry("key", build)
    assert (path / "lib" / "forward.so").read_bytes() == LIBRARY


def build_until_killed(root: str, started: Any) -> None:
    def build(folder: Path) -> None:
        write_entry(folder)
        started.set()
        time.sleep(600)

    BuildCache(root).entry("key", build)


def test_of_two_processes_one_builds_and_the_other_waits(cache: BuildCache, tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = spawn.Event()
    processes = [spawn.Process(target=build_slowly, args=(str(cache.root), str(log), started)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert leftovers(cache) == []


def test_a_killed_builder_leaves_nothing_that_is_used(cache: BuildCache) -> None:
    started = spawn.Event()
    process = spawn.Process(target=build_until_killed, args=(str(cache.root), started))
    process.start()
    assert started.wait(timeout=120)
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert len(leftovers(cache)) == 1
    assert cache.list() == ()

    build = CountedBuild()
    cache.entry("other", build)
    assert len(leftovers(cache)) == 0, "building another key cleans up, too"
    cache.entry("key", build)
    assert build.calls == 2


def test_a_killed_builder_is_cleaned_up_by_the_same_key(cache: BuildCache) -> None:
    (cache.root / "building" / "key-abc").mkdir(parents=True)
    (cache.root / "building" / "key-abc" / "half").write_text("x")
    cache.entry("key", write_entry)
    assert leftovers(cache) == []


def test_a_running_build_is_left_alone(cache: BuildCache) -> None:
    """Builds, removals and clearing of other keys do not touch a folder whose builder lives."""
    other = BuildCache(cache.root)

    def build(folder: Path) -> None:
        other.entry("second", write_entry)
        other.remove("second")
        assert folder.is_dir()
        write_entry(folder)

    cache.entry("first", build)
    assert [entry.key for entry in cache.list()] == ["first"]


def test_threads_share_one_build(cache: BuildCache) -> None:
    build = CountedBuild()

    def slow(folder: Path) -> None:
        time.sleep(0.2)
        build(folder)

    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(cache.entry("key", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1
    assert set(paths) == {cache.root / "entries" / "key"}
    assert len(paths) == 4


# Folders that cannot be used. The tests may run as root, for whom permissions mean nothing.


@pytest.fixture(params=["file", "proc"])
def impossible_root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "proc":
        return Path("/proc/stepdown")
    (tmp_path / "file").write_text("not a folder")
    return tmp_path / "file" / "cache"


def test_a_root_that_cannot_be_written_is_one_sentence(impossible_root: Path) -> None:
    build = CountedBuild()
    cache = BuildCache(impossible_root)
    with pytest.raises(CacheError) as raised:
        cache.entry("key", build)
    message = str(raised.value)
    assert message.startswith(f'The build cache "{impossible_root}" cannot be written (')
    assert message.endswith('set "STEPDOWN_CACHE" to a folder that can.')
    assert build.calls == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_can_be_read(cache: BuildCache) -> None:
    path = cache.entry("key", write_entry)
    folders = [folder for folder in (cache.root, *cache.root.rglob("*")) if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert cache.entry("key", CountedBuild()) == path
        with pytest.raises(CacheError):
            cache.entry("other", write_entry)
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_an_existing_entry_needs_no_lock(cache: BuildCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.entry("key", write_entry)

    def refused(*arguments: object, **options: object) -> None:
        raise AssertionError("a lock was asked for")

    monkeypatch.setattr(cache_module.filelock, "FileLock", refused)
    assert cache.entry("key", CountedBuild()) == path


# Listing and removing


def test_listing_says_what_is_there(cache: BuildCache) -> None:
    assert cache.list() == ()
    cache.entry("aa1", write_entry)
    cache.entry("ab2", writes("manifest.json", '{"description": "mine"}'))
    cache.entry("b", writes("x", "123"))
    os.utime(cache.root / "entries" / "aa1" / "files.json", (2e9, 2e9))
    entries = {entry.key: entry for entry in cache.list()}
    assert next(iter(entries)) == "aa1", "the last used first"
    assert entries["aa1"].description == "encoder layer embed=8 batch=any dtype=float32"
    assert entries["ab2"].description == "mine"
    assert entries["b"].description == ""
    listing = (entries["b"].path / "files.json").stat().st_size
    assert entries["b"].size == 3 + listing
    assert entries["aa1"].last_used.timestamp() == 2e9
    assert abs(entries["aa1"].created.timestamp() - time.time()) < 600

    cache.entry("aa1", write_entry)
    assert cache.find("aa1").last_used.timestamp() < 2e9, "opening an entry is using it"


def test_one_entry_is_removed_by_an_unambiguous_prefix(cache: BuildCache) -> None:
    for key in ("aa1", "ab2", "b"):
        cache.entry(key, write_entry)
    for prefix, number in (("a", "2 entries"), ("c", "no entry"), ("", "3 entries")):
        with pytest.raises(OptionError, match=f'The key prefix "{prefix}" stands for {number}'):
            cache.remove(prefix)
    assert cache.remove("aa").key == "aa1"
    assert sorted(entry.key for entry in cache.list()) == ["ab2", "b"]
    assert leftovers(cache) == []


def test_clearing_removes_everything_that_nobody_holds(cache: BuildCache) -> None:
    assert cache.clear() == ()
    for key in ("a", "b"):
        cache.entry(key, write_entry)
    (cache.root / "entries" / "b" / "files.json").unlink()  # damaged: not listed, removed all the same
    (cache.root / "building" / "c-xyz").mkdir()
    (cache.root / "dace" / "pch").mkdir(parents=True)
    assert [entry.key for entry in cache.clear()] == ["a"]
    assert list((cache.root / "entries").iterdir()) == []
    assert leftovers(cache) == []
    assert not (cache.root / "dace").exists()
