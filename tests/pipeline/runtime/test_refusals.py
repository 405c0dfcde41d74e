# mypy: disable-error-code="union-attr,operator"
"""What a compiled layer refuses: one sentence with what was given and what is accepted, and nothing is run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepdown.models.errors import InputError
from stepdown.pipeline.runtime import StepdownLayer

from .conftest import BuildFactory, FakeBuild


@pytest.fixture
def layer(build32: FakeBuild) -> StepdownLayer:
    return build32.layer().eval()


def sentence(call: Callable[[], Any]) -> str:
    """The message of the error, which must be one sentence of one line."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "accepted" in text
    assert text.endswith(".")
    assert "\n" not in text
    assert ". " not in text
    return text


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 8), "x of shape [3, 8] was given; accepted is [batch, seq, 8]."),
        ((1, 2, 3, 8), "x of shape [1, 2, 3, 8] was given; accepted is [batch, seq, 8]."),
        ((2, 3, 9), "x of shape [2, 3, 9] was given; accepted is [batch, seq, 8]."),
        ((0, 3, 8), "x of shape [0, 3, 8] was given; accepted is [batch, seq, 8] with sizes of at least 1."),
        ((2, 0, 8), "x of shape [2, 0, 8] was given; accepted is [batch, seq, 8] with sizes of at least 1."),
        ((), "x of shape [] was given; accepted is [batch, seq, 8]."),
    ],
)
def test_shape_of_the_input(layer: StepdownLayer, shape: tuple[int, ...], message: str) -> None:
    assert sentence(lambda: layer(torch.zeros(shape))) == message


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_dtype_of_the_input(layer: StepdownLayer, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    expected = f"x of dtype {name} was given; accepted is float32, for which the layer was compiled."
    assert sentence(lambda: layer(torch.zeros(2, 3, 8, dtype=dtype))) == expected


def test_device_of_the_input(layer: StepdownLayer) -> None:
    text = sentence(lambda: layer(torch.zeros(2, 3, 8, device="meta")))
    assert text == 'x on device "meta" was given; accepted is "cpu", for which the layer was compiled.'


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "NoneType"),
        ([[[0.0] * 8]], "list"),
        (torch.zeros(2, 3, 8).numpy(), "ndarray"),
        (torch.zeros(2, 3, 8).to_sparse(), "Tensor of layout sparse_coo"),
        (torch.zeros(2, 3, 8).as_subclass(Subclass), "Subclass"),
    ],
)
def test_type_of_the_input(layer: StepdownLayer, value: Any, name: str) -> None:
    assert sentence(lambda: layer(value)) == f"x of type {name} was given; accepted is a dense torch.Tensor."


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (torch.ones(2, 4, dtype=torch.bool), "of shape [2, 4]"),
        (torch.ones(3, 2, dtype=torch.bool), "of shape [3, 2]"),
        (torch.ones(3, dtype=torch.bool), "of shape [3]"),
        (torch.ones(2, 1, 1, 3, dtype=torch.int64), "of shape [2, 1, 1, 3]"),
        (torch.zeros(2, 3), "of dtype float32"),
        (torch.zeros(2, 1, 1, 3), "of dtype float32"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "of dtype bfloat16"),
        (torch.ones(2, 3, dtype=torch.bool, device="meta"), 'on device "meta"'),
        (torch.ones(2, 3, dtype=torch.bool).to_sparse(), "of type Tensor of layout sparse_coo"),
        ([[1, 1, 1], [1, 1, 0]], "of type list"),
        (True, "of type bool"),
    ],
)
def test_mask(layer: StepdownLayer, mask: Any, given: str) -> None:
    expected = (
        f"attention_mask {given} was given; accepted is a boolean or integer tensor [2, 3] on the CPU, 1 where keys "
        "are "
        f"attended to."
    )
    assert sentence(lambda: layer(torch.zeros(2, 3, 8), mask)) == expected


@pytest.mark.parametrize(
    ("options", "shape", "accepted"),
    [
        ({"batch": 2}, (3, 4, 8), "[2, seq, 8]"),
        ({"seq": 4}, (3, 5, 8), "[batch, 4, 8]"),
        ({"batch": 2, "seq": 4}, (2, 3, 8), "[2, 4, 8]"),
        ({"batch": 2, "seq": 4}, (3, 4, 8), "[2, 4, 8]"),
    ],
)
def test_promised_sizes(
    make_build: BuildFactory, options: dict[str, int], shape: tuple[int, ...], accepted: str
) -> None:
    build = make_build(**options)
    layer = build.layer().eval()
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(layer(x), build.expected(layer, x))
    expected = f"x of shape {list(shape)} was given; accepted is {accepted}, as promised when the layer was compiled."
    assert sentence(lambda: layer(torch.zeros(shape))) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layer: layer.double(),
            "of dtype float64 was given; accepted is float32, for which the layer was compiled.",
        ),
        (
            lambda layer: layer.half(),
            "of dtype float16 was given; accepted is float32, for which the layer was compiled.",
        ),
        (
            lambda layer: layer.to("meta"),
            'on device "meta" was given; accepted is "cpu", for which the layer was compiled.',
        ),
    ],
)
def test_moved_parameters(layer: StepdownLayer, change: Callable[[nn.Module], object], message: str) -> None:
    change(layer)
    text = sentence(lambda: layer(torch.zeros(2, 3, 8)))
    assert text == f'parameter "attention.self.query.weight" {message}'
    if not layer.output.dense.weight.is_meta:
        layer.float()(torch.zeros(2, 3, 8))


def test_resized_and_missing_parameters(layer: StepdownLayer) -> None:
    other = copy.deepcopy(layer)
    layer.intermediate.dense.weight = nn.Parameter(torch.zeros(13, 8))
    text = sentence(lambda: layer(torch.zeros(2, 3, 8)))
    assert text == 'parameter "intermediate.dense.weight" of shape [13, 8] was given; accepted is [12, 8].'
    layer.intermediate.dense.weight.data = torch.zeros(8, 12)
    assert "of shape [8, 12]" in sentence(lambda: layer(torch.zeros(2, 3, 8)))
    del other.output.dense.bias
    text = sentence(lambda: other(torch.zeros(2, 3, 8)))
    assert text == 'parameter "output.dense.bias" of type NoneType was given; accepted is a dense torch.Tensor.'


def test_sparse_parameters(layer: StepdownLayer) -> None:
    layer.output.dense.weight = nn.Parameter(torch.zeros(8, 12).to_sparse())
    assert "of layout sparse_coo" in sentence(lambda: layer(torch.zeros(2, 3, 8)))


@pytest.mark.parametrize("path", ["output", "output.dense", "attention.self.query"])
def test_replaced_parts(layer: StepdownLayer, path: str) -> None:
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, nn.Linear(8, 8))
    text = sentence(lambda: layer(torch.zeros(2, 3, 8)))
    assert f'"{path}" of a compiled layer was replaced by Linear' in text
    delattr(layer.get_submodule(parent), name)
    assert f'"{path}" of a compiled layer was replaced by NoneType' in sentence(lambda: layer(torch.zeros(2, 3, 8)))


def test_hooks_on_parts(layer: StepdownLayer) -> None:
    assert "a hook on a part" in sentence(lambda: layer.output.dense.register_forward_hook(print))
    assert "a hook on a part" in sentence(lambda: layer.attention.register_full_backward_hook(print))
    called = []
    layer.register_forward_hook(lambda module, inputs, output: called.append(output.shape))
    layer(torch.zeros(2, 3, 8))
    assert called == [(2, 3, 8)]


def test_transforms(layer: StepdownLayer) -> None:
    x = torch.randn(4, 2, 3, 8)
    assert "torch.func" in sentence(lambda: torch.func.vmap(layer)(x))
    assert "torch.func" in sentence(lambda: torch.func.grad(lambda x: layer(x).sum())(x[0]))
    assert "torch.func" in sentence(lambda: torch.func.jvp(layer, (x[0],), (x[0],)))

    def dual() -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            return layer(torch.autograd.forward_ad.make_dual(x[0], x[0]))

    assert "forward-mode" in sentence(dual)
    with torch.no_grad():
        assert "forward-mode" in sentence(dual)
        assert "torch.jit.trace" in sentence(lambda: torch.jit.trace(layer, (x[0],)))
    layer(x[0])
