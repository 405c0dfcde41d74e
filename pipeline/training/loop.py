"""The training loop."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedModel

from stepdown.models.dtypes import resolve_dtype
from stepdown.pipeline.training.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    RunIdentity,
    check_identity,
    load_tokenizer,
    restore,
)
from stepdown.pipeline.training.curves import CurveFile, LossCurve, plot_losses
from stepdown.pipeline.training.data import IGNORED, MaskedBatches, Text, read_text, text_blocks, train_tokenizer
from stepdown.pipeline.training.errors import CheckpointError, TrainingError
from stepdown.pipeline.training.hugging_face import LayerFactory
from stepdown.pipeline.training.interrupts import Interrupt
from stepdown.pipeline.training.memory import peak_memory, reset_peak_memory
from stepdown.pipeline.training.model import CompiledLayers, build_model, weights_digest
from stepdown.pipeline.training.optimizer import make_optimizer, set_learning_rate
from stepdown.pipeline.training.options import StepRecord, TrainingOptions, TrainingResult

CURVE_CSV = "loss.csv"
CURVE_PNG = "loss.png"
CHECKPOINTS = "checkpoints"

_LOCK = ".lock"


def run(
    options: TrainingOptions,
    *,
    progress: bool = True,
    make_layer: LayerFactory | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> TrainingResult:
    """See :func:`stepdown.pipeline.training.train`."""
    text = read_text(options.text)
    with ExitStack() as stack:
        stack.enter_context(_exclusive(options.out))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        display = stack.enter_context(_progress_bar(progress))
        checkpoints = CheckpointFolder(options.out / CHECKPOINTS, options.keep)
        started_from = _starting_point(checkpoints, options)
        identity = RunIdentity(options.fixed(), text.digest)
        if started_from is not None:
            check_identity(started_from, identity)
        task = display.add_task("reading the text", total=options.steps, figures="")
        tokenizer = _tokenizer(started_from, text, options.largest_vocabulary)
        vocabulary = tokenizer.get_vocab_size()
        blocks = text_blocks(tokenizer, text, options.batch, options.seq)
        batches = MaskedBatches(
            blocks, batch=options.batch, vocabulary=vocabulary, fraction=options.mask_fraction, seed=options.seed
        )

        display.update(task, description="building the model")
        compiled = CompiledLayers(
            batch=options.batch,
            seq=options.seq,
            dtype=options.dtype,
            progress=lambda stage: display.update(task, description=f"compiling the layer: {stage}"),
        )
        model = build_model(options, vocabulary, make_layer or compiled)
        initial_weights = weights_digest(model)
        optimizer = make_optimizer(model, options)
        curve = LossCurve() if started_from is None else restore(started_from, model, optimizer)
        done = len(curve.records)

        display.update(task, description=f"training ({options.backend})", completed=done)
        reset = reset_peak_memory()
        interrupt = stack.enter_context(Interrupt())
        curve_csv, curve_png = options.out / CURVE_CSV, options.out / CURVE_PNG
        curve_file = stack.enter_context(CurveFile(curve_csv, curve))
        for step in range(done + 1, options.steps + 1):
            record = _train_step(model, optimizer, batches, options, step)
            curve.records.append(record)
            curve_file.append(record)
            figures = f"loss {record.loss:.4f}  {record.tokens_per_second:,.0f} tokens/s"
            display.update(task, completed=step, figures=figures)
            stopping = interrupt.requested
            due = options.checkpoint_every and step % options.checkpoint_every == 0
            if due or stopping or step == options.steps:
                started_from = checkpoints.write(identity, model, optimizer, tokenizer, curve)
            if on_step is not None:
                on_step(record)
            if stopping:
                raise KeyboardInterrupt
        peak = peak_memory() if reset else None
        plot_losses(curve_png, {options.backend: curve.losses}, f"{options.model}, {options.text.name}")
        # The first step of a process pays for allocations and threads that later ones reuse.
        timed = curve.records[done:][1:] or curve.records[done:]
        assert started_from is not None
        return TrainingResult(
            losses=curve.losses,
            resumed_from=done,
            seconds=sum(record.seconds for record in timed),
            tokens_per_second=statistics.median(record.tokens_per_second for record in timed) if timed else 0.0,
            peak_memory=peak,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            vocabulary=vocabulary,
            blocks=len(blocks),
            initial_weights=initial_weights,
            checkpoint=started_from.path,
            curve_csv=curve_csv,
            curve_png=curve_png,
            build=compiled.build,
        )


def _train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: MaskedBatches,
    options: TrainingOptions,
    step: int,
) -> StepRecord:
    began = time.perf_counter()
    batch = batches.at(step)
    learning_rate = options.learning_rate_at(step)
    set_learning_rate(optimizer, learning_rate)
    logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)
    # Hugging Face's own loss is in the type of the logits: three digits in bfloat16.
    accumulated = logits.to(resolve_dtype(options.dtype).accumulate.torch)
    loss = functional.cross_entropy(accumulated, batch.labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    value, norm_value = loss.item(), norm.item()
    if not math.isfinite(value) or not math.isfinite(norm_value):
        raise TrainingError(
            f"The loss is {value} and its gradient's norm {norm_value} at step {step}; "
            f'accepted are finite ones, which a smaller "learning_rate" than {options.learning_rate:g} may give.'
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    return StepRecord(step, value, learning_rate, norm_value, seconds, batch.input_ids.numel())


def _starting_point(checkpoints: CheckpointFolder, options: TrainingOptions) -> Checkpoint | None:
    """The checkpoint to resume from.

    :raises CheckpointError: when there is none, or when there is one and the run is a new one.
    """
    if options.resume:
        return checkpoints.latest()
    if found := checkpoints.all():
        raise CheckpointError(
            f'The folder "{options.out}" holds a run of {found[-1].step} steps; '
            "accepted are another folder, or resuming that run."
        )
    return None


def _tokenizer(checkpoint: Checkpoint | None, text: Text, vocabulary: int) -> Tokenizer:
    return train_tokenizer(text, vocabulary) if checkpoint is None else load_tokenizer(checkpoint)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and holds it for this process.

    :raises CheckpointError: when it cannot be written, or another process trains into it.
    """
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise CheckpointError(f'Another process trains into "{folder}"; accepted is a folder of its own.') from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f'The folder "{folder}" cannot be written ({reason}); accepted is a writable one.'
        ) from None
    try:
        yield
    finally:
        lock.release()


def _progress_bar(visible: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not visible,
    )
