"""The stage table, its records, and the build folders they are read from."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stepdown.models.errors import OptionError
from stepdown.pipeline.analysis.expressions import evaluate
from stepdown.pipeline.build_folder import find_build, known_sizes, read_build
from stepdown.pipeline.cache import BuildCache
from stepdown.pipeline.report import duration, moved_change, quantity, stage_records, stage_table


def rendered(manifest: dict[str, Any], *sizes: int, width: int = 100) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(stage_table(manifest, *sizes))
    return capture.get()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2359296*B*S", 2359296 * 6),
        ("B*S**2 + 3*S - 1", 2 * 9 + 8),
        ("B**(-1)", 0.5),
        ("ceiling(S/2) + floor(S/2)", 3),
        ("int_ceil(S, 2) + int_floor(S, 2)", 3),
        ("Max(B, S)*Min(B, S)", 6),
        ("-(B + 1)*2", -6),
        ("S//2 + S % 2", 2),
        ("1.5*B", 3),
        (7, 7),
    ],
)
def test_expressions_have_their_values(text: str | int, value: float) -> None:
    assert evaluate(text, {"B": 2, "S": 3}) == value


def test_large_values_are_exact() -> None:
    assert evaluate("B**5*S**5 + 1", {"B": 10**5, "S": 10**5}) == 10**50 + 1


def test_what_sizes_leave_open_stays_text() -> None:
    assert evaluate("4*B*S", {"B": 2, "S": None}) == "4*B*S"
    assert evaluate("4*B", {"B": 2}) == 8


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "B.real",
        "(lambda: 1)()",
        "1/0",
        "",
        "B**S**S",
        "9**99999",
        "B if S else 1",
        "'x'",
        "(" * 500,
    ],
)
def test_nothing_but_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(OptionError, match="is not a number of a build"):
        evaluate(text, {"B": 2, "S": 30})


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (1000, "B", "1.00 kB"),
        (12_582_912, "B", "12.6 MB"),
        (999_600_000, "B", "1.00 GB"),
        (309_237_645_312, "flop", "309 Gflop"),
        (44_800_000_000, "", "44.8 G"),
        ("4*B*S", "B", "4*B*S"),
        (None, "B", "–"),
    ],
)
def test_quantities_have_three_digits(value: int | str | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3e-6, "3 µs"), (0.0125, "12.5 ms"), (0.99999, "1 s"), (59.9, "59.9 s"), (125, "2 min 5 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_records_are_numbers_at_given_sizes(hand_made_build: Path) -> None:
    records = stage_records(read_build(hand_made_build).manifest, 2, 3)
    assert [record["name"] for record in records] == ["parse", "differentiate", "fuse"]
    assert records[1]["flop"] == 192 * 6
    assert records[1]["forward"]["kept_bytes"] == 96
    assert records[1]["backward"]["bytes_moved"] == 96 * 6 + 256
    assert records[0]["backward"] is None


def test_records_stay_symbolic_without_sizes(hand_made_build: Path) -> None:
    manifest = read_build(hand_made_build).manifest
    assert stage_records(manifest)[0]["flop"] == "64*B*S"
    assert stage_records(manifest, 2)[0]["flop"] == "64*B*S"


def test_the_manifest_is_left_as_it_was(hand_made_build: Path) -> None:
    manifest = read_build(hand_made_build).manifest
    before = json.dumps(manifest)
    stage_table(manifest, 2, 3)
    assert json.dumps(manifest) == before


def test_the_table_shows_every_stage_with_both_directions(hand_made_build: Path) -> None:
    text = rendered(read_build(hand_made_build).manifest, 8, 128)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if "forward" in line] == ["parse", "forward", "forward"]
    assert sum("backward " in line and "pass" not in line for line in lines) == 2
    assert "1 operator from <the program>" in text
    assert "Counts are for B=8, S=128." in text
    (fuse,) = [line for line in lines if line.split()[:2] == ["fuse", "both"]]
    assert "-50.0 %" in fuse


def test_the_table_shows_every_pass(hand_made_build: Path) -> None:
    lines = [line.split() for line in rendered(read_build(hand_made_build).manifest, 8, 128).splitlines()]
    (first,) = [line for line in lines if line[:1] == ["fuse-first"]]
    (second,) = [line for line in lines if line[:1] == ["fuse-second"]]
    assert first[1:] == ["3", "197", "k", "111", "kB", "16.4", "kB"]
    assert second[1:] == ["2", "197", "k", "73.9", "kB", "-33.3", "%", "16.4", "kB"]


def test_the_table_fits_80_columns(hand_made_build: Path) -> None:
    text = rendered(read_build(hand_made_build).manifest, 8, 128, width=80)
    assert "containers" in text
    assert max(map(len, text.splitlines())) <= 80


def test_symbolic_counts_say_how_to_get_numbers(hand_made_build: Path) -> None:
    manifest = read_build(hand_made_build).manifest
    assert "--batch and --seq" in rendered(manifest)
    assert "Counts are for B=8 and in S; --seq" in rendered(manifest, 8)


def test_stages_are_compared_only_with_their_like() -> None:
    forward = {"bytes_moved": 100, "backward": None}
    both = {"bytes_moved": 300, "backward": {"bytes_moved": 200}}
    assert moved_change(None, forward) == ""
    assert moved_change(forward, both) == ""
    assert moved_change(both, {**both, "bytes_moved": 231.27}) == "-22.9 %"
    assert moved_change(both, dict(both)) == "±0 %"
    assert moved_change(both, {**both, "bytes_moved": "B"}) == ""


def test_a_promised_size_is_used_and_kept(promised_manifest: dict[str, Any]) -> None:
    assert known_sizes(promised_manifest) == {"B": 2, "S": None}
    assert known_sizes(promised_manifest, 2, 5) == {"B": 2, "S": 5}
    with pytest.raises(OptionError, match='"batch" is 3; this build accepts 2 only'):
        known_sizes(promised_manifest, 3)
    with pytest.raises(OptionError, match='"seq" is 0'):
        known_sizes(promised_manifest, None, 0)


def test_a_build_is_found_by_folder_and_by_key(hand_made_build: Path, tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    content = (hand_made_build / "manifest.json").read_bytes()

    def build(folder: Path) -> None:
        (folder / "manifest.json").write_bytes(content)

    cache.entry("ab" * 32, build)
    assert find_build(str(hand_made_build)).path == hand_made_build
    assert find_build("abab", cache).manifest["key"].startswith("0123")
    for name in ("cd", "no such build"):
        with pytest.raises(OptionError, match=name):
            find_build(name, cache)


def test_graphs_are_found_by_stage_and_direction(hand_made_build: Path) -> None:
    build = read_build(hand_made_build)
    assert build.graph_file("parse", "backward") is None
    assert build.graph_file("fuse", "forward") is None
    found = build.graph_file("differentiate", "backward")
    assert found is not None
    assert found.name == "01-differentiate.backward.sdfgz"
    with pytest.raises(OptionError, match='stage "lower" is unknown'):
        build.graph_file("lower", "forward")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2}', '{"format": 1, "layer": {}, "options": {}}', '{"format": 1, "stages": 3}']
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(OptionError, match=r"manifest\.json"):
        read_build(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a build"):
        read_build(tmp_path)
