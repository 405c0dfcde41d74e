"""Parameters that the libraries read as one: views of one block of memory, wherever PyTorch moves them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import CompiledLayer, compile_layer
from stepdown.pipeline.runtime import StepdownLayer

DEFINITION = EncoderLayer(embed=24, heads=2, ffn=40, norm="pre", dropout=0.0, attention_dropout=0.0)
PACKS = {kind: [f"attention.self.{name}.{kind}" for name in ("query", "key", "value")] for kind in ("weight", "bias")}


@pytest.fixture(scope="module")
def compiled(session_cache: Path, strict_dace_session: None) -> CompiledLayer:
    """Pre-norm with biases, in float64, compiled for testing."""
    return compile_layer(DEFINITION, dtype="float64", optimize="light")


@pytest.fixture
def layer(compiled: CompiledLayer) -> StepdownLayer:
    module = compiled.to_torch()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module


def together(layer: nn.Module) -> bool:
    """Whether the parameters of every pack lie one after the other in one storage."""
    named = dict(layer.named_parameters())
    return all(
        following.data_ptr() == one.data_ptr() + one.nbytes
        and following.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
        for names in PACKS.values()
        for one, following in zip(
            [named[name] for name in names[:-1]], [named[name] for name in names[1:]], strict=True
        )
    )


def reference_of(layer: nn.Module) -> ReferenceEncoderLayer:
    reference = ReferenceEncoderLayer(DEFINITION).double()
    reference.load_state_dict(layer.state_dict())
    return reference


def results(module: nn.Module, x: Tensor, mask: Tensor, upstream: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Output and every gradient of the module's parameters, which must have none before."""
    x = x.clone().requires_grad_()
    y = module(x, mask)
    y.backward(upstream)
    yield "y", y.detach()
    assert x.grad is not None
    yield "x", x.grad
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            yield name, parameter.grad


def gradient_of(layer: nn.Module, name: str) -> Tensor:
    found = layer.get_parameter(name).grad
    assert found is not None
    return found


def check(layer: nn.Module, reference: nn.Module | None = None) -> None:
    """Output and every gradient equal PyTorch's."""
    x, upstream = torch.randn(2, 3, 5, 24, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 2:] = False
    expected = dict(results(reference or reference_of(layer), x, mask, upstream))
    found = dict(results(layer, x, mask, upstream))
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
    layer.zero_grad()


def test_a_new_layer_is_packed_and_equals_pytorch(layer: StepdownLayer) -> None:
    assert together(layer)
    check(layer)
    assert together(layer)


def test_names_and_shapes_are_hugging_faces(layer: StepdownLayer) -> None:
    expected = {name: torch.Size(p.shape) for name, p in DEFINITION.parameters().items()}
    assert {name: value.shape for name, value in layer.state_dict().items()} == expected
    assert all(parameter.is_leaf and parameter.is_contiguous() for parameter in layer.parameters())


def test_training_keeps_the_pack_and_the_optimizer(layer: StepdownLayer) -> None:
    reference = reference_of(layer)
    steps = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (layer, reference)]
    mask = torch.ones(3, 5, dtype=torch.bool)
    for _ in range(3):
        x = torch.randn(3, 5, 24, dtype=torch.float64)
        for module, step in zip((layer, reference), steps, strict=True):
            step.zero_grad()
            module(x, mask).square().mean().backward()
            step.step()
    assert together(layer)
    for one, other in zip(layer.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("way", ["torch", "safetensors", "assign"])
def test_state_is_saved_and_loaded(way: str, layer: StepdownLayer, compiled: CompiledLayer, tmp_path: Path) -> None:
    state = layer.state_dict()
    if way == "safetensors":
        safetensors.torch.save_file(state, tmp_path / "layer.safetensors")
        state = safetensors.torch.load_file(tmp_path / "layer.safetensors")
    else:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        state = torch.load(buffer)
    other = compiled.to_torch()
    other.load_state_dict({name: value.clone() for name, value in state.items()}, assign=way == "assign")
    assert together(other) == (way != "assign")
    check(other, reference_of(layer))
    assert together(other)


@pytest.mark.parametrize("move", ["deepcopy", "pickle", "to and back", "data", "new parameter", "share memory"])
def test_what_moves_is_packed_again(move: str, layer: StepdownLayer) -> None:
    reference = reference_of(layer)
    identities = {name: id(parameter) for name, parameter in layer.named_parameters()}
    match move:
        case "deepcopy":
            layer = copy.deepcopy(layer)
        case "pickle":
            layer = pickle.loads(pickle.dumps(layer))
        case "to and back":
            layer.to(torch.float32).to(torch.float64)
            reference = reference_of(layer)
        case "data":
            for parameter in layer.parameters():
                parameter.data = parameter.data.clone()
        case "new parameter":
            part = layer.get_submodule("attention.self.key")
            part.weight = nn.Parameter(part.get_parameter("weight").detach().clone())
            identities["attention.self.key.weight"] = id(part.weight)
        case "share memory":
            layer.share_memory()
    check(layer, reference)
    assert together(layer)
    if move in ("to and back", "data", "new parameter", "share memory"):
        assert {name: id(parameter) for name, parameter in layer.named_parameters()} == identities


def test_parameters_that_move_between_forward_and_backward_give_the_same_gradients(layer: StepdownLayer) -> None:
    x, upstream = torch.randn(2, 3, 5, 24, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    expected = dict(results(reference_of(layer), x, mask, upstream))
    y = layer(x, mask)
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    y.backward(upstream)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


def test_views_of_other_memory_stay_where_they_are(layer: StepdownLayer) -> None:
    """As sharding does: parameters are views of one flat buffer, in another order."""
    reference = reference_of(layer)
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in layer.parameters()])
    parts = flat.split([parameter.numel() for parameter in layer.parameters()])
    for parameter, part in zip(layer.parameters(), parts, strict=True):
        parameter.data = part.view(parameter.shape)
    check(layer, reference)
    first = next(layer.parameters())
    assert not together(layer)
    assert first.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_values_given_for_one_call_are_differentiated(layer: StepdownLayer) -> None:
    given = {
        name: (value.detach() * 1.5).requires_grad_() if "key" in name else value.detach() * 1.5
        for name, value in layer.named_parameters()
    }
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    for module in (layer, reference_of(layer)):
        y = torch.func.functional_call(module, {name: value * 2 for name, value in given.items()}, (x,))
        y.sum().backward()
    name = "attention.self.key.weight"
    both = given[name].grad
    assert both is not None
    given[name].grad = None
    torch.func.functional_call(reference_of(layer), {n: value * 2 for n, value in given.items()}, (x,)).sum().backward()
    once = given[name].grad
    assert once is not None
    torch.testing.assert_close(both, 2 * once, rtol=1e-10, atol=1e-12)
    assert together(layer)


def test_a_parametrized_projection_is_differentiated(layer: StepdownLayer) -> None:
    class Double(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * value

    reference = reference_of(layer)
    for module in (layer, reference):
        nn.utils.parametrize.register_parametrization(module.get_submodule("attention.self.value"), "weight", Double())
    check(layer, reference)


def test_gradients_lie_in_one_block_and_accumulate(layer: StepdownLayer) -> None:
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    layer(x).sum().backward()
    for names in PACKS.values():
        one, *others = (gradient_of(layer, name) for name in names)
        assert not one._is_view()
        assert all(other.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for other in others)
    before = {name: gradient_of(layer, name).clone() for name in layer.state_dict()}
    layer(x).sum().backward()
    for name, value in before.items():
        torch.testing.assert_close(gradient_of(layer, name), 2 * value)


@pytest.mark.parametrize("frozen", [["query"], ["key", "value"], ["query", "key", "value"]], ids="-".join)
def test_parameters_that_need_no_gradient_get_none(frozen: list[str], layer: StepdownLayer) -> None:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not any(f".{part}." in name for part in frozen))
    check(layer)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == any(f".{part}." in name for part in frozen), name
