"""Training runs: what they leave behind, the same numbers with both backends, and what they refuse."""

import csv
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.pipeline.training import (
    CheckpointError,
    StepRecord,
    TextError,
    TrainingError,
    TrainingOptions,
    TrainingResult,
    train,
)
from stepdown.pipeline.training.curves import relative_differences

Options = Callable[..., TrainingOptions]
Layers = Callable[[EncoderLayer], nn.Module]


@pytest.fixture(scope="module")
def finished(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """A run of 40 steps, dropout on."""
    out = tmp_path_factory.mktemp("finished")
    return train(
        TrainingOptions(
            text=small_text, out=out, model="bert-tiny", backend="torch", steps=40, batch=4, seq=32,
            vocabulary=160, learning_rate=2e-3, checkpoint_every=15, keep=2,
        ),
        progress=False,
    )  # fmt: skip


def test_the_loss_falls(finished: TrainingResult) -> None:
    assert len(finished.losses) == 40
    assert sum(finished.losses[-5:]) / 5 < finished.losses[0] - 0.5


def test_the_result_says_what_was_done(finished: TrainingResult) -> None:
    assert finished.resumed_from == 0 and finished.build is None
    assert finished.vocabulary <= 160 and finished.blocks >= 4
    with finished.curve_csv.open(encoding="utf-8") as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)][1:]
    assert finished.seconds == pytest.approx(sum(seconds))
    assert finished.tokens_per_second == pytest.approx(4 * 32 / statistics.median(seconds))
    assert finished.peak_memory is None or finished.peak_memory > 4 * finished.parameters
    assert finished.checkpoint.name == "step-00000040"


def test_the_curve_is_left_as_csv_and_png(finished: TrainingResult) -> None:
    with finished.curve_csv.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    assert tuple(float(row["loss"]) for row in rows) == finished.losses
    assert float(rows[3]["learning_rate"]) == pytest.approx(2e-3)
    assert all(float(row["gradient_norm"]) > 0 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert finished.curve_png.read_bytes().startswith(b"\x89PNG")


def test_checkpoints_come_in_time_and_only_the_latest_stay(finished: TrainingResult) -> None:
    folder = finished.checkpoint.parent
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-00000030", "step-00000040"]


def test_equal_seeds_give_equal_runs_and_leave_the_callers_generator_alone(small_options: Options) -> None:
    before = torch.get_rng_state()
    first = train(small_options(out=small_options().out / "a"), progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    second = train(small_options(out=small_options().out / "b"), progress=False)
    third = train(small_options(out=small_options().out / "c", seed=1), progress=False)
    assert first.losses == second.losses and first.initial_weights == second.initial_weights
    assert first.losses != third.losses and first.initial_weights != third.initial_weights


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_both_backends_begin_with_the_same_weights_and_stay_together(
    small_options: Options, reference_layer: Layers, dtype: str
) -> None:
    made = []

    def make(definition: EncoderLayer) -> nn.Module:
        made.append(definition)
        return reference_layer(definition).to(getattr(torch, dtype))

    results = [
        train(
            small_options(backend=backend, out=small_options().out / backend, dropout=0.0, dtype=dtype),
            progress=False,
            make_layer=make,
        )
        for backend in ("torch", "stepdown")
    ]
    assert len(made) == 2 and made[0].dropout == made[0].attention_dropout == 0
    assert results[0].initial_weights == results[1].initial_weights
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}[dtype]
    assert max(relative_differences(results[1].losses, results[0].losses)) < tolerance
    assert any(loss * 2**8 % 1 for loss in results[0].losses)  # the loss itself is not rounded to 16 bits


def test_the_learning_rate_of_each_step_is_used(small_options: Options) -> None:
    records: list[StepRecord] = []
    options = small_options(steps=5, warmup=2)
    train(options, progress=False, on_step=records.append)
    assert [record.learning_rate for record in records] == [options.learning_rate_at(step) for step in range(1, 6)]
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert all(record.tokens == 32 for record in records)


def refused(error: pytest.ExceptionInfo[Exception]) -> str:
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_a_loss_that_is_not_finite_ends_the_run(small_options: Options, reference_layer: Layers) -> None:
    def broken(definition: EncoderLayer) -> nn.Module:
        layer = reference_layer(definition)
        layer.register_forward_hook(lambda module, args, output: output * torch.nan)
        return layer

    with pytest.raises(TrainingError) as error:
        train(small_options(backend="stepdown"), progress=False, make_layer=broken)
    assert "step 1" in refused(error) and "learning_rate" in refused(error)


def test_a_bad_text_is_refused(small_options: Options, tmp_path: Path) -> None:
    with pytest.raises(TextError) as error:
        train(small_options(text=tmp_path / "none.txt"), progress=False)
    assert "none.txt" in refused(error)
    small = tmp_path / "small.txt"
    small.write_text("too few words", encoding="utf-8")
    with pytest.raises(TextError) as error:
        train(small_options(text=small), progress=False)
    assert "2 blocks" in refused(error)


def test_a_folder_that_cannot_be_written_is_refused(small_options: Options, small_text: Path) -> None:
    for folder in (small_text / "below-a-file", Path("/proc/stepdown")):
        with pytest.raises(CheckpointError) as error:
            train(small_options(out=folder), progress=False)
        assert str(folder) in refused(error)


def test_a_folder_in_use_is_refused(small_options: Options) -> None:
    options = small_options()
    options.out.mkdir(parents=True)
    with FileLock(options.out / ".lock"), pytest.raises(CheckpointError) as error:
        train(options, progress=False)
    assert "Another process" in refused(error)


def test_a_finished_run_is_not_overwritten(small_options: Options) -> None:
    train(small_options(), progress=False)
    with pytest.raises(CheckpointError) as error:
        train(small_options(), progress=False)
    assert "holds a run of 6 steps" in refused(error)


def test_a_missing_package_is_named(small_options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: Any) -> Any:
        if name == "stepdown.pipeline.training.loop":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers.masking_utils")
        return importer(name, *rest)

    importer = __import__
    monkeypatch.setattr("builtins.__import__", missing)
    with pytest.raises(OptionError) as error:
        train(small_options(), progress=False)
    assert '"stepdown[train]"' in refused(error)


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt")
def test_an_interrupt_leaves_a_checkpoint_to_resume_from(small_options: Options) -> None:
    whole = train(small_options(out=small_options().out / "whole"), progress=False)

    def interrupt(record: StepRecord) -> None:
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small_options(), progress=False, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train(small_options(resume=True), progress=False)
    assert resumed.resumed_from == 4
    assert resumed.losses == whole.losses


def test_progress_goes_to_the_error_stream(small_options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_options(steps=2))
    captured = capsys.readouterr()
    assert captured.out == "" and "training (torch)" in captured.err and "tokens/s" in captured.err
