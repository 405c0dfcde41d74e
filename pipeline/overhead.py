"""What a call of a compiled layer costs besides its kernels, which are replaced by a function that returns at once.

Run ``python -m stepdown.pipeline.overhead`` to measure a small layer and put the rows into
``results/call_overhead.csv``. Beside each number stands what PyTorch takes for a ``torch.autograd.Function`` in Python
with the same inputs, which allocates its results and does nothing else: most of a backward call is PyTorch's, which
hands on a gradient for every parameter. Times are of the processor, because other work can only add to them.

Dimension legend: `B` batch, `S` sequence length, `E` embedding, `H` head, `U` feed-forward size.
"""

import copy
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepdown.models.definition import EncoderLayer
from stepdown.pipeline.compiler import compile_layer
from stepdown.pipeline.results import Row, describe_device, installed_versions, rounded, save_rows, spread_of, today
from stepdown.pipeline.runtime import StepdownLayer

OURS, BARE = "stepdown", "torch.autograd.Function"
SMALL = EncoderLayer(embed=32, heads=2, ffn=64)
RESULTS = Path("results/call_overhead.csv")

Samples = dict[tuple[str, str], list[float]]
"""Microseconds of one call in every round, by case and implementation."""


class BareFunction(torch.autograd.Function):
    """A function of any tensors with an output, and a gradient for each input, of any content."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


def without_kernels(layer: StepdownLayer, batch: int, seq: int) -> StepdownLayer:
    """A layer with the same parameters whose calls at one batch and length do everything but the arithmetic."""
    copied = copy.copy(layer)
    with torch.no_grad():
        copied(torch.zeros(batch, seq, layer.definition.embed, dtype=next(layer.parameters()).dtype))
    copied.__dict__["_call"] = layer._binding.layer.without_kernels().call
    return copied


def measure(layer: StepdownLayer, batch: int, seq: int, *, number: int = 200, rounds: int = 40) -> Samples:
    """Time calls of a layer without its kernels, in its present mode, with a key mask.

    :param number: calls in a round.
    """
    empty = without_kernels(layer, batch, seq)
    x = torch.randn(batch, seq, layer.definition.embed, dtype=next(layer.parameters()).dtype, requires_grad=True)
    mask = torch.ones(batch, seq, dtype=torch.bool)
    gradient = torch.ones_like(x)
    wanted = [x, *layer.parameters()]

    def infer() -> None:
        with torch.no_grad():
            empty(x, mask)

    def train() -> None:
        torch.autograd.grad(empty(x, mask), wanted, gradient)

    def bare() -> None:
        torch.autograd.grad(BareFunction.apply(*wanted), wanted, gradient)

    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("inference", OURS): infer,
        ("forward", OURS): lambda: empty(x, mask),
        ("both", OURS): train,
        ("forward", BARE): lambda: BareFunction.apply(*wanted),
        ("both", BARE): bare,
    }
    samples: Samples = {key: [] for key in runs}
    for _ in range(rounds):  # interleaved, so that whatever else the machine does meets all alike
        for key, run in runs.items():
            samples[key].append(timeit.timeit(run, timer=time.thread_time, number=number) / number * 1e6)
    for name in (OURS, BARE):
        pairs = zip(samples.pop(("both", name)), samples["forward", name], strict=True)
        samples["backward", name] = [both - forward for both, forward in pairs]
    return samples


def rows_of(samples: Samples, definition: EncoderLayer, batch: int, seq: int, command: str) -> list[Row]:
    """One row for each case and implementation."""
    shape = {"B": batch, "S": seq, "E": definition.embed, "H": definition.heads, "U": definition.ffn}
    rows = []
    for (case, implementation), values in samples.items():
        median, spread = spread_of(values)
        rows.append(
            Row(
                name="call overhead",
                case=case,
                implementation=implementation,
                device=describe_device(torch.get_num_threads()),
                versions=installed_versions(),
                shape=shape,
                dtype="float32",
                median=rounded(median),
                spread=rounded(spread),
                repeats=len(values),
                date=today(),
                command=command,
                unit="us",
                values={"best": rounded(min(values))},
            )
        )
    return rows


def main() -> None:
    """Measure :data:`SMALL` in training mode and save the rows."""
    torch.set_num_threads(1)
    batch, seq = 2, 8
    layer = compile_layer(SMALL, optimize="light").to_torch().train()
    rows = rows_of(measure(layer, batch, seq), SMALL, batch, seq, f"python -m {__spec__.name}")
    save_rows(RESULTS, rows)
    for row in rows:
        print(f"{row.case:10} {row.implementation:24} {row.median:8.1f} us, best {row.values['best']:.1f}")


if __name__ == "__main__":
    main()
