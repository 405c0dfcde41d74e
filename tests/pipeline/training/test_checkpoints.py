"""Checkpoints: a resumed run is the run that was not interrupted, to the last bit; damage is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoTokenizer, BertForMaskedLM

from stepdown.models.definition import EncoderLayer
from stepdown.pipeline.training import CheckpointError, StepRecord, TrainingOptions, TrainingResult, checkpoints, train

Options = Callable[..., TrainingOptions]
Layers = Callable[[EncoderLayer], nn.Module]


class Killed(Exception):
    """What ends a run in the middle."""


def kill_after(step: int) -> Callable[[StepRecord], None]:
    def stop(record: StepRecord) -> None:
        if record.step == step:
            raise Killed

    return stop


def weights(result: TrainingResult) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(result.checkpoint / "model.safetensors")


@pytest.mark.parametrize("backend", ["torch", "stepdown"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    small_options: Options, reference_layer: Layers, backend: str
) -> None:
    plan = {"backend": backend, "steps": 9, "checkpoint_every": 4}
    whole = train(small_options(**plan, out=small_options().out / "whole"), progress=False, make_layer=reference_layer)
    with pytest.raises(Killed):  # between two checkpoints: steps 5 and 6 are done again
        train(small_options(**plan), progress=False, make_layer=reference_layer, on_step=kill_after(6))
    torch.rand(17)
    resumed = train(small_options(**plan, resume=True), progress=False, make_layer=reference_layer)
    assert resumed.resumed_from == 4
    assert resumed.losses == whole.losses
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    states = [safetensors.torch.load_file(run.checkpoint / "optimizer.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    rows = [run.curve_csv.read_text(encoding="utf-8").splitlines() for run in (whole, resumed)]
    assert [row.split(",")[:2] for row in rows[0]] == [row.split(",")[:2] for row in rows[1]]


def test_without_the_generator_state_it_would_differ(small_options: Options) -> None:
    """The test above can fail: dropout is on and depends on the state."""
    plan = {"steps": 4, "checkpoint_every": 2}
    whole = train(small_options(**plan, out=small_options().out / "whole"), progress=False)
    with pytest.raises(Killed):
        train(small_options(**plan), progress=False, on_step=kill_after(2))
    (path,) = small_options().out.glob("checkpoints/step-*")
    run = safetensors.torch.load_file(path / "run.safetensors")
    run["random/torch"] = torch.Generator().manual_seed(99).get_state()
    safetensors.torch.save_file(run, path / "run.safetensors")
    resumed = train(small_options(**plan, resume=True), progress=False)
    assert resumed.losses[:2] == whole.losses[:2] and resumed.losses[2:] != whole.losses[2:]


def test_a_finished_run_resumes_to_its_result(small_options: Options) -> None:
    first = train(small_options(), progress=False)
    again = train(small_options(resume=True), progress=False)
    assert (again.losses, again.checkpoint, again.resumed_from) == (first.losses, first.checkpoint, 6)
    assert again.seconds == 0 == again.tokens_per_second


def test_hugging_face_loads_a_checkpoint_of_either_backend(small_options: Options, reference_layer: Layers) -> None:
    loaded = []
    for backend in ("torch", "stepdown"):
        options = small_options(backend=backend, out=small_options().out / backend, dropout=0.0)
        result = train(options, progress=False, make_layer=reference_layer)
        tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
        assert tokenizer.convert_ids_to_tokens(tokenizer("[MASK]").input_ids) == ["[CLS]", "[MASK]", "[SEP]"]
        inputs = tokenizer("a layer is written once", return_tensors="pt")
        model = BertForMaskedLM.from_pretrained(result.checkpoint).eval()
        for name, tensor in weights(result).items():
            assert torch.equal(model.get_parameter(name), tensor), name
        loaded.append(model(**inputs).logits)
    torch.testing.assert_close(loaded[0], loaded[1], rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_one_backend_is_the_others(small_options: Options, reference_layer: Layers) -> None:
    result = train(small_options(backend="stepdown"), progress=False, make_layer=reference_layer)
    state = json.loads((result.checkpoint / "state.json").read_text(encoding="utf-8"))
    assert state["step"] == 6 and state["options"]["backend"] == "stepdown"
    names = {name for name, _ in BertForMaskedLM.from_pretrained(result.checkpoint).named_parameters()}
    assert names == weights(result).keys()


def refused(options: TrainingOptions) -> str:
    with pytest.raises(CheckpointError) as error:
        train(options, progress=False)
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_nothing_to_resume_from_is_refused(small_options: Options) -> None:
    assert "no checkpoint" in refused(small_options(resume=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 7), ("batch", 3), ("learning_rate", 2e-3), ("seed", 1), ("dropout", 0.0), ("backend", "stepdown")],
)
def test_resuming_with_other_options_is_refused(small_options: Options, name: str, value: object) -> None:
    train(small_options(), progress=False)
    assert f'"{name}"' in refused(small_options(**{name: value}, resume=True))


def test_resuming_with_another_text_is_refused(small_options: Options, small_text: Path, tmp_path: Path) -> None:
    train(small_options(), progress=False)
    moved, other = tmp_path / "moved.txt", tmp_path / "other.txt"
    moved.write_bytes(small_text.read_bytes())
    other.write_bytes(small_text.read_bytes() + b" more")
    assert train(small_options(text=moved, resume=True), progress=False).resumed_from == 6
    assert "another text" in refused(small_options(text=other, resume=True))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "run.safetensors", "state.json", "tokenizer.json"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_is_refused(small_options: Options, name: str, damage: str) -> None:
    result = train(small_options(steps=2), progress=False)
    path = result.checkpoint / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert f'damaged in "{name}"' in refused(small_options(steps=2, resume=True))


def test_a_checkpoint_of_another_model_is_refused(small_options: Options) -> None:
    result = train(small_options(steps=2), progress=False)
    path = result.checkpoint / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    first = next(iter(tensors))
    safetensors.torch.save_file(tensors | {first: tensors[first][:1].contiguous()}, path)
    assert "another shape" in refused(small_options(steps=2, resume=True))
    del tensors[first]
    safetensors.torch.save_file(tensors, path)
    assert "missing or unknown" in refused(small_options(steps=2, resume=True))


def test_a_write_that_fails_leaves_the_checkpoints_before_it(
    small_options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"steps": 4, "checkpoint_every": 2}
    written = []
    save = checkpoints._save

    def full(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if "step-00000004" in str(path) and path.name == "optimizer.safetensors":
            written.append(path)
            raise OSError(28, "No space left on device")
        save(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_save", full)
        assert "No space left on device" in refused(small_options(**plan))
    assert written
    assert os.listdir(small_options().out / "checkpoints") == ["step-00000002"]
    assert train(small_options(**plan, resume=True), progress=False).resumed_from == 2


def test_a_half_written_checkpoint_is_no_checkpoint_and_goes_away(small_options: Options) -> None:
    plan = {"steps": 4, "checkpoint_every": 2}
    with pytest.raises(Killed):
        train(small_options(**plan), progress=False, on_step=kill_after(2))
    folder = small_options().out / "checkpoints"
    leftover = folder / ".step-00000004.12345"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert train(small_options(**plan, resume=True), progress=False).resumed_from == 2
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000004"]
