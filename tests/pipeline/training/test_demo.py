"""What the demonstration judges. The whole of it runs as ``make run``."""

from dataclasses import replace
from pathlib import Path

import pytest

from stepdown.pipeline.training import TextError, TrainingError, TrainingOptions, TrainingResult
from stepdown.pipeline.training.demo import COMPARED_STEPS, TOLERANCE, compare, train_apart, write_manual


def result(losses: tuple[float, ...], weights: str = "same") -> TrainingResult:
    return TrainingResult(
        losses=losses,
        resumed_from=0,
        seconds=1.0,
        tokens_per_second=1.0,
        peak_memory=None,
        parameters=1,
        vocabulary=1,
        blocks=1,
        initial_weights=weights,
        checkpoint=Path(),
        curve_csv=Path(),
        curve_png=Path(),
        build=None,
    )


def test_curves_within_the_tolerance_agree() -> None:
    comparison = compare(result((4.0, 3.0 * (1 + 0.9 * TOLERANCE))), result((4.0, 3.0)))
    assert comparison.agrees and comparison.step == 2
    assert comparison.difference == pytest.approx(0.9 * TOLERANCE)


def test_one_step_beyond_it_is_enough_to_disagree() -> None:
    losses = [4.0] * COMPARED_STEPS
    losses[17] *= 1 - 1.1 * TOLERANCE
    comparison = compare(result(tuple(losses)), result((4.0,) * COMPARED_STEPS))
    assert not comparison.agrees and comparison.step == 18


def test_later_steps_are_not_judged() -> None:
    assert compare(result((4.0,) * COMPARED_STEPS + (3.0,)), result((4.0,) * (COMPARED_STEPS + 1))).agrees


def test_runs_from_different_weights_are_not_compared() -> None:
    with pytest.raises(TrainingError, match="different weights"):
        compare(result((1.0,)), replace(result((1.0,)), initial_weights="other"))


def test_the_manual_is_a_real_text(tmp_path: Path) -> None:
    write_manual(tmp_path / "manual.txt")
    text = (tmp_path / "manual.txt").read_text(encoding="utf-8")
    assert len(text) > 400_000 and 'The "assert" statement' in text


def test_a_run_in_its_own_process(small_text: Path, tmp_path: Path) -> None:
    options = TrainingOptions(
        text=small_text, out=tmp_path, model="bert-tiny", backend="torch", steps=2, batch=2, seq=16, vocabulary=160
    )
    assert len(train_apart(options).losses) == 2
    with pytest.raises(TextError, match="does not exist"):
        train_apart(replace(options, text=tmp_path / "none.txt", out=tmp_path / "other"))
