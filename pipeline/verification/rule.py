"""The 1.1 rule: a layer's errors against float64 are those of PyTorch's eager layer, give or take little.

For the output and every gradient, with `|.|` the Frobenius norm and errors pooled over the draws,

    sqrt(sum |layer - oracle|^2) / sqrt(sum |oracle|^2)  <=  f * (the same of PyTorch's eager layer) + eps / 32

with f = 1.1 at bfloat16 and float16 and 1.5 at float32 and float64; at float64 also below 1e-12. Layer, PyTorch and
oracle see the same inputs, weights at fan-in scale, and the same dropout masks. Gradients that are zero by mathematics
are measured against the size of their summands instead of `|oracle|`. A number that is not finite fails, unless the
oracle has it as well.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.errors import InputError, OptionError
from stepdown.models.operators.philox import keep_mask
from stepdown.models.reference import ReferenceEncoderLayer, attention_pattern
from stepdown.pipeline.verification.draws import Draw, draw_inputs, load_parameters, run_layer
from stepdown.pipeline.verification.extended import ExtendedEncoderLayer, require_extended_precision
from stepdown.pipeline.verification.masks import MaskRow, compare_masks
from stepdown.pipeline.verification.report import Report, Row
from stepdown.pipeline.verification.summands import AttentionProbe, summand_norms

FACTORS = {"bfloat16": 1.1, "float16": 1.1, "float32": 1.5, "float64": 1.5}
"""How many times PyTorch's error is allowed."""

ALLOWANCE = 1 / 32
"""What is allowed beyond that, in units of the dtype's epsilon."""

FLOAT64_LIMIT = 1e-12
"""The largest relative error of a float64 layer."""

DRAWS = 16
"""Draws over which errors are pooled."""


def verify_layer(
    module: nn.Module,
    definition: EncoderLayer,
    dtype: str | torch.dtype | DataType,
    batch: int,
    seq: int,
    *,
    mask: Tensor | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    dropout: bool = True,
    masks: bool = False,
    mask_name: str | None = None,
    on_draw: Callable[[int], None] | None = None,
) -> Report:
    """Verify a layer by the 1.1 rule.

    :param module: a module like ``StepdownLayer``: `module(x, attention_mask=...)`, Hugging Face's parameter names, and
        ``last_rng`` with the pair (seed, offset) of the last call in training mode. Its parameters and its mode are put
        back afterwards.
    :param definition: the layer that ``module`` is meant to be.
    :param dtype: what ``module`` computes in.
    :param batch: `B`
    :param seq: `S`
    :param mask: key mask `[B, S]`, boolean or integer, or None.
    :param draws: how many draws of inputs, weights and dropout masks errors are pooled over.
    :param dropout: training mode with dropout, or evaluation mode without.
    :param masks: whether to read the dropout masks out of the layer and compare them bit for bit as well.
    :param mask_name: what ``mask`` is called in the report.
    :param on_draw: called with the number of finished draws.
    :raises InputError: when the module cannot be called like this, has other parameters or reports no ``last_rng``.
    :raises OptionError: when the dtype is unknown, ``draws`` is not positive, or float64 cannot be judged here.
    """
    dtype = resolve_dtype(dtype)
    if draws < 1:
        raise OptionError(f"draws={draws} was given; accepted is a positive integer.")
    if dtype.name == "float64":
        require_extended_precision()
    device = next(module.parameters()).device
    mask = None if mask is None else mask.to(device)
    training = dropout and any(definition.dropout_sites)
    if mask_name is None:
        mask_name = "none" if mask is None else "given"
    rows: tuple[Row, ...] = ()
    mask_rows: tuple[MaskRow, ...] = ()
    with _borrowed(module, training):
        skipped = why_pytorch_cannot(definition, dtype, device)
        if skipped is None:
            judge = _Judge(definition, dtype, mask, training, device)
            for number in range(draws):
                draw = draw_inputs(definition, dtype, batch, seq, seed * draws + number, device)
                found, keep = judge.run_module(module, draw, seed * draws + number)
                judge.add(found, draw, keep, masks and number == 0)
                if on_draw is not None:
                    on_draw(number + 1)
            rows, mask_rows = judge.rows(), judge.mask_rows
    return Report(definition, dtype.name, batch, seq, mask_name, draws, seed, training, rows, mask_rows, skipped)


def why_pytorch_cannot(definition: EncoderLayer, dtype: DataType, device: torch.device) -> str | None:
    """Why PyTorch's eager layer cannot be computed at this dtype on this device, or None where it can."""
    layer = ReferenceEncoderLayer(definition).to(device, dtype.torch)
    x = torch.zeros(1, 1, definition.embed, dtype=dtype.torch, device=device, requires_grad=True)
    try:
        layer(x).sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        if "not implemented" not in str(error):
            raise
        return f'PyTorch {torch.__version__} cannot compute {dtype.name} on "{device.type}": {error}.'
    return None


@contextmanager
def _borrowed(module: nn.Module, training: bool) -> Iterator[None]:
    """The module in the wanted mode; its parameters and mode, and PyTorch's generators, are put back at the end."""
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    mode = module.training
    module.train(training)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        load_parameters(module, before)
        module.train(mode)


@dataclass
class _Pool:
    """Sums of squares over the draws."""

    layer: float = 0.0
    torch: float = 0.0
    scale: float = 0.0
    vanishing: bool = False

    def row(self, name: str, dtype: DataType) -> Row:
        error, torch_error = _relative(self.layer, self.scale), _relative(self.torch, self.scale)
        limit = FACTORS[dtype.name] * torch_error + ALLOWANCE * dtype.epsilon
        passed = math.isfinite(error) and error <= limit
        if dtype.name == "float64":
            passed = passed and error < FLOAT64_LIMIT
        return Row(name, error, torch_error, limit, passed, self.vanishing)


def _relative(squares: float, scale: float) -> float:
    """A relative error; where the oracle and all its summands are zero, so must be everything else."""
    if squares == 0:
        return 0.0
    return math.sqrt(squares / scale) if scale > 0 else math.inf


class _Judge:
    """Runs oracle and PyTorch beside a layer and pools the errors of both."""

    def __init__(
        self, definition: EncoderLayer, dtype: DataType, mask: Tensor | None, training: bool, device: torch.device
    ) -> None:
        self.definition, self.dtype, self.mask, self.training = definition, dtype, mask, training
        self.oracle = ReferenceEncoderLayer(definition).to(device, torch.float64).train(training)
        self.torch_layer = ReferenceEncoderLayer(definition).to(device, dtype.torch).train(training)
        self.probe = AttentionProbe.attach(self.oracle)
        self.pools: dict[str, _Pool] = {}
        self.mask_rows: tuple[MaskRow, ...] = ()

    def run_module(self, module: nn.Module, draw: Draw, seed: int) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """The layer's results, and the dropout masks that it must have used."""
        load_parameters(module, draw.parameters)
        torch.manual_seed(seed)
        results = run_layer(module, draw, lambda x: module(x, attention_mask=self.mask))
        if not self.training:
            return results, {}
        last_rng = getattr(module, "last_rng", None)
        if last_rng is None:
            raise InputError('a module without "last_rng" after a call in training mode was given; accepted is a pair.')
        pair = [int(word) for word in last_rng]
        keep = {}
        for site, probability in enumerate(self.definition.dropout_sites):
            if probability > 0:
                shape = self.definition.dropout_shape(site, *draw.x.shape[:2])
                keep[site] = torch.from_numpy(keep_mask(pair[0], pair[1], site, shape, probability)).to(draw.x.device)
        return results, keep

    def add(self, found: dict[str, Tensor], draw: Draw, keep: dict[int, Tensor], read_masks: bool) -> None:
        """Compare the results of one draw."""
        load_parameters(self.torch_layer, draw.parameters)
        load_parameters(self.oracle, draw.parameters)
        exact = draw.to(torch.float64)
        theirs = run_layer(self.torch_layer, draw, lambda x: self.torch_layer(x, self.mask, keep))
        expected = run_layer(self.oracle, exact, lambda x: self.oracle(x, self.mask, keep))
        norms = summand_norms(self.definition, self.probe, self.mask, keep.get(0))
        if read_masks and keep:
            self.mask_rows = compare_masks(self.oracle, exact.x, self.mask, keep, found["y"], theirs["y"])
        reference: Mapping[str, np.ndarray] = {name: value.cpu().numpy() for name, value in expected.items()}
        if self.dtype.name == "float64":
            reference = self._extended(draw, keep)
        for name, oracle in reference.items():
            pool = self.pools.setdefault(name, _Pool())
            pool.layer += squared_error(found[name], oracle)
            pool.torch += squared_error(theirs[name], oracle)
            pool.scale += norms[name] ** 2 if name in norms else squared_norm(oracle)
            pool.vanishing = pool.vanishing or name in norms

    def _extended(self, draw: Draw, keep: Mapping[int, Tensor]) -> dict[str, np.ndarray]:
        parameters = {name: value.cpu().numpy() for name, value in draw.parameters.items()}
        batch, seq, _ = draw.x.shape
        allowed = attention_pattern(self.definition, batch, seq, self.mask, draw.x.device)
        return ExtendedEncoderLayer(self.definition, parameters).run(
            draw.x.cpu().numpy(),
            draw.upstream.cpu().numpy(),
            None if allowed is None else allowed.cpu().numpy(),
            {site: value.cpu().numpy() for site, value in keep.items()},
        )

    def rows(self) -> tuple[Row, ...]:
        return tuple(pool.row(name, self.dtype) for name, pool in self.pools.items())


def squared_error(found: Tensor, oracle: np.ndarray) -> float:
    """The squared Frobenius norm of the difference, where the oracle is finite.

    Infinite if one of the two is not finite where the other is, or is so in another way.
    """
    values = found.detach().double().cpu().numpy().astype(oracle.dtype)
    finite = np.isfinite(oracle)
    if not np.array_equal(values[~finite], oracle[~finite], equal_nan=True) or not np.isfinite(values[finite]).all():
        return math.inf
    return squared_norm(values[finite] - oracle[finite])


def squared_norm(values: np.ndarray) -> float:
    """The squared Frobenius norm of what is finite."""
    finite = values[np.isfinite(values)]
    return float((finite * finite).sum())
