"""Checkpoints: folders of safetensors and JSON that appear whole or not at all.

``OUT/checkpoints/step-00000100/`` holds

* ``model.safetensors``, ``config.json``, ``tokenizer.json``, ``tokenizer_config.json``: what Hugging Face's
  ``from_pretrained`` loads;
* ``optimizer.safetensors``: AdamW's state as `quantity/parameter name`;
* ``run.safetensors``: PyTorch's generator state and the loss curve so far;
* ``state.json``: the step, the options, the text's digest and the versions.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from stepdown.pipeline.training.curves import LossCurve
from stepdown.pipeline.training.data import SPECIAL_TOKENS
from stepdown.pipeline.training.errors import CheckpointError
from stepdown.pipeline.training.optimizer import load_optimizer_tensors, optimizer_tensors

FORMAT = 1

_NAME = re.compile(r"step-(\d{8,})")

_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(_ROLES, SPECIAL_TOKENS, strict=True))}


@dataclass(frozen=True)
class Checkpoint:
    """A folder and the step after which it was written."""

    path: Path
    step: int


@dataclass(frozen=True)
class RunIdentity:
    """What a resumed run must share with the run that wrote the checkpoint."""

    options: Mapping[str, object]
    text: str


class CheckpointFolder:
    """The checkpoints of one run.

    :param path: the folder, made when the first checkpoint is written.
    :param keep: how many stay.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def all(self) -> list[Checkpoint]:
        """Every whole checkpoint, oldest first."""
        if not self.path.is_dir():
            return []
        named = ((entry, _NAME.fullmatch(entry.name)) for entry in self.path.iterdir())
        found = (Checkpoint(entry, int(match[1])) for entry, match in named if match)
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint:
        """The checkpoint of the highest step.

        :raises CheckpointError: when there is none.
        """
        found = self.all()
        if not found:
            raise CheckpointError(f'There is no checkpoint in "{self.path}"; accepted is the folder of an earlier run.')
        return found[-1]

    def write(
        self,
        identity: RunIdentity,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        curve: LossCurve,
    ) -> Checkpoint:
        """Writes a checkpoint after the last step of ``curve`` and deletes the oldest beyond ``keep``.

        The files are complete and on the disk before the folder gets its name.

        :raises CheckpointError: when that fails; the checkpoints written before stay.
        """
        step = len(curve.records)
        final = self.path / f"step-{step:08d}"
        partial = self.path / f".{final.name}.{os.getpid()}"
        state = {
            "format": FORMAT,
            "step": step,
            "options": dict(identity.options),
            "text": identity.text,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        run = {"random/torch": torch.get_rng_state()}
        run |= {f"curve/{name}": column for name, column in curve.to_tensors().items()}
        try:
            self._remove_leftovers()
            partial.mkdir(parents=True)
            _save(partial / "model.safetensors", dict(model.named_parameters()))
            _save(partial / "optimizer.safetensors", optimizer_tensors(optimizer))
            _save(partial / "run.safetensors", run)
            _write(partial / "config.json", _configuration(model))
            _write(partial / "tokenizer.json", tokenizer.to_str(pretty=False))
            _write(
                partial / "tokenizer_config.json",
                json.dumps(_TOKENIZER | {"model_max_length": model.config.max_position_embeddings}, indent=1),
            )
            _write(partial / "state.json", json.dumps(state, indent=1))
            for file in (*partial.iterdir(), partial):
                _synchronise(file)
            os.rename(partial, final)
            _synchronise(self.path)
            for old in self.all()[: -self.keep]:
                doomed = self.path / f".{old.path.name}.old"
                os.rename(old.path, doomed)
                shutil.rmtree(doomed)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f'The checkpoint "{final}" cannot be written: {reason}.') from error
        return Checkpoint(final, step)

    def _remove_leftovers(self) -> None:
        """Deletes what a killed process left half written. Only one process works in a run's folder."""
        if self.path.is_dir():
            for entry in self.path.glob(".step-*"):
                shutil.rmtree(entry)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint.

    :raises CheckpointError: when it is missing or damaged.
    """
    text = _read(checkpoint, "tokenizer.json")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing narrower)
        raise _damaged(checkpoint, "tokenizer.json", error) from None


def check_identity(checkpoint: Checkpoint, identity: RunIdentity) -> None:
    """Refuses to resume a run with other options or another text.

    :raises CheckpointError: naming the first option that differs.
    """
    try:
        state: dict[str, Any] = json.loads(_read(checkpoint, "state.json"))
        options, text, written = state["options"], state["text"], state["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, "state.json", error) from None
    if written != FORMAT:
        raise CheckpointError(f'The checkpoint "{checkpoint.path}" has format {written}; accepted is {FORMAT}.')
    for name, asked in identity.options.items():
        if options.get(name) != asked:
            raise CheckpointError(
                f'The run in "{checkpoint.path}" has "{name}" {options.get(name)!r}, not {asked!r}; '
                f"a resumed run accepts the options it began with."
            )
    if text != identity.text:
        raise CheckpointError(
            f'The run in "{checkpoint.path}" was trained on another text; a resumed run accepts the text it began with.'
        )


def restore(checkpoint: Checkpoint, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> LossCurve:
    """Puts model, optimizer and PyTorch's generator into the state of ``checkpoint``; returns the loss curve so far.

    :raises CheckpointError: when a file is missing, damaged, or of another model.
    """
    weights = _load(checkpoint, "model.safetensors")
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        name = min(weights.keys() ^ parameters.keys())
        raise _damaged(checkpoint, "model.safetensors", f'parameter "{name}" is missing or unknown')
    with torch.no_grad():
        for name, parameter in parameters.items():
            if (weights[name].shape, weights[name].dtype) != (parameter.shape, parameter.dtype):
                raise _damaged(checkpoint, "model.safetensors", f'parameter "{name}" has another shape or dtype')
            parameter.copy_(weights[name])
    try:
        load_optimizer_tensors(optimizer, _load(checkpoint, "optimizer.safetensors"))
    except KeyError as error:
        raise _damaged(checkpoint, "optimizer.safetensors", f"{error} is missing") from None
    run = _load(checkpoint, "run.safetensors")
    try:
        curve = LossCurve.from_tensors({name.removeprefix("curve/"): value for name, value in run.items()})
        torch.set_rng_state(run["random/torch"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise _damaged(checkpoint, "run.safetensors", error) from None
    if len(curve.records) != checkpoint.step:
        raise _damaged(checkpoint, "run.safetensors", f"it holds {len(curve.records)} steps")
    return curve


def _configuration(model: PreTrainedModel) -> str:
    configuration = json.loads(model.config.to_json_string(use_diff=False))
    return json.dumps(configuration | {"architectures": [type(model).__name__]}, indent=1)


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # Copies: safetensors refuses parameters that are views of one buffer.
    copies = (
        (name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in tensors.items()
    )
    safetensors.torch.save_file(dict(copies), path, metadata={"format": "pt"})


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(checkpoint.path / name)
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(checkpoint, name, error) from None


def _read(checkpoint: Checkpoint, name: str) -> str:
    try:
        return (checkpoint.path / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(checkpoint, name, error) from None


def _damaged(checkpoint: Checkpoint, name: str, why: object) -> CheckpointError:
    return CheckpointError(f'The checkpoint "{checkpoint.path}" is damaged in "{name}": {why}.')
