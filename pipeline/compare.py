"""A compiled layer beside PyTorch's, measured in one run on one machine: time, memory, error.

Dimension legend: `B` batch, `S` sequence length, `E` embedding.

Repetitions are interleaved: every implementation runs once, then all again, each time beginning with another one, so
that whatever else the machine does meets all alike. Times are of training mode, with the layer's dropout; errors are of
evaluation mode, where no implementation drops anything.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.errors import BuildError, OptionError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.compiler import compile_layer
from stepdown.pipeline.results import Row, describe_device, installed_versions, rounded, spread_of, this_command, today

OURS = "stepdown"
BASELINES = {
    "eager": "the reference layer, attention written out",
    "sdpa": "the reference layer, attention by scaled_dot_product_attention",
    "compile": 'torch.compile of "eager"',
    "compile-sdpa": 'torch.compile of "sdpa"',
}
"""What a layer can be compared with."""

CASES = ("forward", "forward+backward")

Report = Callable[[str], None]


@dataclass
class Measured:
    """One implementation: seconds of every repetition by case, bytes kept for the backward pass, errors against eager.

    ``kept_bytes`` counts every storage that autograd saves, parameters excepted. Errors are relative Frobenius norms,
    of the output and of all gradients together.
    """

    implementation: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {case: [] for case in CASES})
    kept_bytes: int = 0
    output_error: float = 0.0
    gradient_error: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare_layer` measured; ``measured`` begins with Stepdown's."""

    name: str
    layer: EncoderLayer
    batch: int
    seq: int
    dtype: DataType
    threads: int
    measured: tuple[Measured, ...]

    def rows(self) -> list[Row]:
        """One row for each implementation and case."""
        common = common_fields(self.name, self.layer, self.batch, self.seq, self.dtype.name, self.threads)
        rows = []
        for one in self.measured:
            values = {
                "kept_bytes": one.kept_bytes,
                "output_error": rounded(one.output_error),
                "gradient_error": rounded(one.gradient_error),
            }
            rows += [timed_row(one.implementation, case, own, values, common) for case, own in one.seconds.items()]
        return rows


def common_fields(name: str, layer: EncoderLayer, batch: int, seq: int, dtype: str, threads: int) -> dict[str, Any]:
    """What all rows of one run have in common."""
    return {
        "name": name,
        "device": describe_device(threads),
        "versions": installed_versions(),
        "shape": {"B": batch, "S": seq, "E": layer.embed, "H": layer.heads, "U": layer.ffn},
        "dtype": dtype,
        "date": today(),
        "command": this_command(),
    }


def timed_row(
    implementation: str, case: str, seconds: Sequence[float], values: Mapping[str, Any], common: Mapping[str, Any]
) -> Row:
    """A row of times in milliseconds: median and distance between the quartiles."""
    middle, spread = spread_of(seconds)
    return Row(
        case=case,
        implementation=implementation,
        median=rounded(middle * 1e3),
        spread=rounded(spread * 1e3),
        repeats=len(seconds),
        values=dict(values),
        **common,
    )


def check_baselines(against: Sequence[str]) -> tuple[str, ...]:
    """``against`` without repetitions.

    :raises OptionError: when one is unknown, or there is none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in against if name.strip()))
    unknown = [name for name in names if name not in BASELINES]
    if unknown or not names:
        given = ", ".join(f'"{name}"' for name in unknown) or "Nothing"
        accepted = ", ".join(f'"{name}"' for name in BASELINES)
        raise OptionError(f"{given} was given to compare against; accepted are {accepted}.")
    return names


def compare_layer(
    name: str,
    layer: EncoderLayer,
    *,
    batch: int,
    seq: int,
    dtype: str = "float32",
    target: str = "cpu",
    against: Sequence[str] = ("eager", "compile"),
    repeats: int = 20,
    symbolic: bool = False,
    report: Report = lambda step: None,
) -> Comparison:
    """Measures ``layer`` compiled by Stepdown and the implementations of ``against`` in PyTorch.

    All have the same weights and read the same input. Uses the threads that PyTorch is set to.

    :param against: keys of :data:`BASELINES`.
    :param repeats: measured repetitions of each implementation, after two that are not.
    :param symbolic: compile for any batch and length instead of these.
    :param report: called with a word before each step of :func:`step_count`.
    :raises OptionError: when a name, size or number is not accepted.
    :raises BuildError: when either compiler fails.
    """
    names = check_baselines(against)
    for what, value in (("batch", batch), ("seq", seq), ("repeats", repeats)):
        if value < 1:
            raise OptionError(f'"{what}" is {value}; accepted is a positive integer.')
    kind = resolve_dtype(dtype)
    reference = ReferenceEncoderLayer(layer).to(kind.torch)
    spread_weights(reference)
    x, gradient = (torch.randn(batch, seq, layer.embed).to(kind.torch) for _ in range(2))
    modules: dict[str, nn.Module] = {}
    report(f"compiling {name}")
    sizes = (None, None) if symbolic else (batch, seq)
    modules[OURS] = compile_layer(layer, batch=sizes[0], seq=sizes[1], dtype=kind.name, target=target).to_torch()
    modules[OURS].load_state_dict(reference.state_dict())
    for baseline in names:
        modules[baseline] = _baseline(baseline, layer, reference)
    expected = _evaluate(reference, x, gradient)
    measured = []
    for implementation, module in modules.items():
        report(f"checking {implementation}")
        measured.append(_check(implementation, module, x, gradient, expected))
    measure_interleaved(measured, modules, x, gradient, repeats, report)
    return Comparison(name, layer, batch, seq, kind, torch.get_num_threads(), tuple(measured))


def step_count(against: Sequence[str], repeats: int) -> int:
    """How often :func:`compare_layer` calls ``report``."""
    return 2 + len(check_baselines(against)) + WARM_UP + repeats


WARM_UP = 2
"""Repetitions before the measured ones."""


@torch.no_grad()
def spread_weights(module: nn.Module) -> None:
    """Weights at fan-in scale and biases that are not zero, so that every gradient has something to say."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _baseline(name: str, layer: EncoderLayer, reference: nn.Module) -> nn.Module:
    module: nn.Module = ReferenceEncoderLayer(layer, attention="sdpa" if name.endswith("sdpa") else "eager")
    module = module.to(next(reference.parameters()).dtype)
    module.load_state_dict(reference.state_dict())
    if name.startswith("compile"):
        module.compile(dynamic=False)
    return module


def _check(
    implementation: str, module: nn.Module, x: Tensor, gradient: Tensor, expected: tuple[Tensor, Tensor]
) -> Measured:
    """Errors and kept bytes; the first call of a torch.compile module is here."""
    try:
        output, gradients = _evaluate(module, x, gradient)
        module.train()
        kept = kept_bytes_of(module, x)
    except RuntimeError as error:
        if not implementation.startswith("compile"):
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f'PyTorch could not compile "{implementation}" ({first}); leave it out to compare the rest.'
        ) from error
    return Measured(
        implementation,
        kept_bytes=kept,
        output_error=_relative(output, expected[0]),
        gradient_error=_relative(gradients, expected[1]),
    )


def _evaluate(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The output and all gradients in one row, float64, without dropout."""
    module.eval()
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    output = module(x)
    output.backward(gradient)
    gradients = [x.grad, *(parameter.grad for parameter in module.parameters())]
    flat = torch.cat([one.detach().double().flatten() for one in gradients if one is not None])
    return output.detach().double(), flat


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def kept_bytes_of(module: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that one forward call saves for its backward pass, parameters excepted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # an address must not be given out twice while we count

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(x.clone().requires_grad_())
    return sum(saved.values())


def measure_interleaved(
    measured: Sequence[Measured],
    modules: dict[str, nn.Module],
    x: Tensor,
    gradient: Tensor,
    repeats: int,
    report: Report,
) -> None:
    """Fills in the seconds of every repetition, after :data:`WARM_UP` that are not measured.

    :param measured: each names a module of ``modules``.
    :param report: called with a word before each repetition.
    """
    for module in modules.values():
        module.train()
    x = x.clone().requires_grad_()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repetition in range(WARM_UP + repeats):
            report("measuring" if repetition >= WARM_UP else "warming up")
            start = repetition % len(measured)
            for one in (*measured[start:], *measured[:start]):
                forward, both = time_once(modules[one.implementation], x, gradient)
                if repetition >= WARM_UP:
                    one.seconds["forward"].append(forward)
                    one.seconds["forward+backward"].append(both)
    finally:
        if collecting:
            gc.enable()


def time_once(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Seconds of a forward call, and of it together with its backward pass."""
    module.zero_grad(set_to_none=True)
    x.grad = None
    start = time.perf_counter()
    output = module(x)
    middle = time.perf_counter()
    output.backward(gradient)
    end = time.perf_counter()
    return middle - start, end - start
