"""Ablations: which variants, what is measured, and the rows; with a compiler and a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import ablation, compare
from stepdown.pipeline.ablation import EVERY_PASS, ablate_layer, step_count, variants_of
from stepdown.pipeline.stages import OPTIONAL_PASSES

LAYER = EncoderLayer(embed=8, heads=2, ffn=16)
REPEATS = 4


class Compiled:
    """Stands for a compiled layer: its counts say how many passes were switched off."""

    def __init__(self, layer: EncoderLayer, disable: tuple[str, ...]) -> None:
        self.layer, self.disable = layer, disable
        off = len(disable)
        last = {"words_in": 100 + off, "words_out": 50, "kept_bytes": 10 * (off + 1), "kernels": 7 + off}
        self.manifest = {"stages": [{}, last]}

    def to_torch(self) -> nn.Module:
        module = ReferenceEncoderLayer(self.layer)
        module.factor = 1 + len(self.disable)  # type: ignore[assignment]
        return module


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Replaces the compiler and the clock: a call takes a second for each pass switched off and one more."""
    made: list[Compiled] = []
    calls: list[int] = []

    def compile_layer(layer: EncoderLayer, **options: Any) -> Compiled:
        assert (options["batch"], options["seq"], options["target"]) == (2, 5, "cpu")
        made.append(Compiled(layer, tuple(options["disable"])))
        return made[-1]

    def time_once(module: Any, x: object, gradient: object) -> tuple[float, float]:
        calls.append(module.factor)
        return float(module.factor), 3.0 * module.factor + 0.1 * (len(calls) % 2)

    monkeypatch.setattr(ablation, "compile_layer", compile_layer)
    monkeypatch.setattr(compare, "time_once", time_once)
    return made


def test_every_optional_pass_is_switched_off_in_turn() -> None:
    variants = variants_of()
    assert variants[EVERY_PASS] == ()
    assert list(variants)[1:-1] == [f"without {name}" for name in OPTIONAL_PASSES]
    assert variants["without any"] == OPTIONAL_PASSES
    assert variants_of([OPTIONAL_PASSES[0]] * 2) == {
        EVERY_PASS: (),
        f"without {OPTIONAL_PASSES[0]}": (OPTIONAL_PASSES[0],),
    }


def test_variants_are_timed_beside_the_full_pipeline(timed: list[Compiled]) -> None:
    steps: list[str] = []
    found = ablate_layer("tiny", LAYER, batch=2, seq=5, repeats=REPEATS, report=steps.append)
    assert [one.disable for one in timed] == list(variants_of().values())
    assert len(steps) == step_count(None, REPEATS)
    assert all(len(samples) == REPEATS for v in found.variants for samples in v.measured.seconds.values())
    first = found.variants[1]
    assert found.slowdown(first, "forward") == 2
    assert found.slowdown(found.variants[0], "forward+backward") == 1


def test_rows_carry_times_words_and_kept_bytes(timed: list[Compiled]) -> None:
    name = OPTIONAL_PASSES[0]
    rows = ablate_layer("tiny", LAYER, batch=2, seq=5, repeats=REPEATS, passes=[name]).rows()
    by_identity = {(row.implementation, row.case): row for row in rows}
    assert len(by_identity) == len(rows) == 4
    row = by_identity[f"without {name}", "forward"]
    assert (row.median, row.unit, row.repeats) == (2000.0, "ms", REPEATS)
    assert row.values == {"against_every_pass": 2.0, "words": 151, "kept_bytes": 20, "kernels": 8}
    assert by_identity[EVERY_PASS, "forward"].values["against_every_pass"] == 1.0
    both = by_identity[EVERY_PASS, "forward+backward"]
    assert 3000 <= both.median <= 3100
    assert both.spread > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, '"batch" is 0'),
        ({"repeats": 0}, '"repeats" is 0'),
        ({"passes": ["lower-operators"]}, '"lower-operators" cannot be switched off'),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ablate_layer("tiny", LAYER, **{"batch": 2, "seq": 5, "repeats": 1, **wrong})
