# mypy: disable-error-code="union-attr,operator,misc,arg-type,func-returns-value,list-item"
"""The module around a build: values, gradients, state, and everything that PyTorch does with modules."""

import copy
import dataclasses
import io
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import BuildError, InputError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.runtime import StepdownLayer, release_memory
from stepdown.pipeline.runtime.memory import pool

from .conftest import SMALL, BuildFactory, FakeBuild

Batch = tuple[Tensor, Tensor]


@pytest.fixture
def layer(build32: FakeBuild) -> StepdownLayer:
    return build32.layer()


@pytest.fixture
def layer64(build64: FakeBuild) -> StepdownLayer:
    return build64.layer()


@pytest.fixture
def batch() -> Batch:
    """`x` [3, 5, 8] and a mask [3, 5] with a whole row of padding."""
    mask = torch.rand(3, 5) < 0.7
    mask[1] = False
    return torch.randn(3, 5, 8, requires_grad=True), mask


def gradients(y: Tensor, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = torch.autograd.grad(y, [x, *layer.parameters()], torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return dict(zip(names, found, strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# Values and gradients


def test_values_and_gradients(build32: FakeBuild, layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    layer.eval()
    y, expected = layer(x, mask), build32.expected(layer, x, mask)
    torch.testing.assert_close(y, expected)
    assert_same(gradients(y, layer, x), gradients(expected, layer, x), rtol=1e-4, atol=1e-4)


def test_gradcheck(layer64: StepdownLayer) -> None:
    layer64.eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    names = [name for name, _ in layer64.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer64, values, (x, mask))

    assert torch.autograd.gradcheck(run, (x, *layer64.parameters()))


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("seq", [1, 7])
def test_one_binary_many_shapes(build32: FakeBuild, layer: StepdownLayer, batch_size: int, seq: int) -> None:
    x = torch.randn(batch_size, seq, 8)
    torch.testing.assert_close(layer.eval()(x), build32.expected(layer, x))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_mask_dtypes(layer: StepdownLayer, batch: Batch, dtype: torch.dtype) -> None:
    x, mask = batch
    assert torch.equal(layer.eval()(x, mask.to(dtype)), layer(x, mask))


def test_masks_with_other_numbers_and_strides(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    expected = layer.eval()(x, mask)
    assert torch.equal(layer(x, mask.long() * -3), expected)
    assert torch.equal(layer(x, mask.t().contiguous().t()), expected)
    assert torch.equal(layer(x, torch.ones(1, 1, dtype=torch.bool).expand(3, 5)), layer(x))


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "negated", "offset"])
def test_strides_of_the_input(build64: FakeBuild, layer64: StepdownLayer, kind: str) -> None:
    wide = torch.randn(4, 6, 16, dtype=torch.float64)
    complex_values = torch.randn(4, 6, 8, dtype=torch.complex128)
    source = {
        "transposed": torch.randn(6, 4, 8, dtype=torch.float64).transpose(0, 1),
        "sliced": wide[:, ::2, 1::2],
        "expanded": torch.randn(1, 6, 8, dtype=torch.float64).expand(4, 6, 8),
        "negated": complex_values.conj().imag,
        "offset": torch.randn(4 * 6 * 8 + 1, dtype=torch.float64)[1:].view(4, 6, 8),
    }[kind]
    assert kind == "offset" or not source.is_contiguous()
    assert source.is_neg() == (kind == "negated")
    found = source.detach().requires_grad_() if kind != "negated" else source
    expected = build64.expected(layer64, found.detach().clone())
    y = layer64.eval()(found)
    torch.testing.assert_close(y, expected)
    if found.requires_grad:
        plain = found.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        y.square().sum().backward()
        layer64(plain).square().sum().backward()
        torch.testing.assert_close(found.grad, plain.grad)


def test_a_gradient_with_any_strides(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    wanted = [x, *layer.eval().parameters()]
    dense = torch.randn(5, 3, 8).transpose(0, 1)
    for strange in (torch.ones(1, 1, 1).expand(3, 5, 8), dense, torch.randn(3, 5, 8, dtype=torch.cfloat).conj().imag):
        found = torch.autograd.grad(layer(x, mask), wanted, strange)
        regular = torch.autograd.grad(layer(x, mask), wanted, strange.resolve_neg().clone().contiguous())
        assert all(map(torch.equal, found, regular))


def test_nan_passes_through(layer: StepdownLayer) -> None:
    x = torch.randn(2, 3, 8)
    x[1, 2, 4] = torch.nan
    y = layer.eval()(x)
    assert y.isnan().nonzero().tolist() == [[1, 2, 4]]


def test_only_wanted_gradients(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    layer.eval()
    everything = gradients(layer(x, mask), layer, x)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("output"))
    y = layer(x.detach(), mask)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    assert x.grad is None
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) != name.startswith("output")
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, everything[name])
    layer.requires_grad_(False)
    (dx,) = torch.autograd.grad(layer(x, mask), [x], torch.linspace(-1, 1, y.numel()).view(y.shape))
    assert torch.equal(dx, everything["x"])
    assert not layer(x.detach(), mask).requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradients_nothing_kept(layer: StepdownLayer, batch: Batch, context: type) -> None:
    x, mask = batch
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        with context():
            y = layer.eval()(x, mask)
        layer.requires_grad_(False)(x.detach(), mask)
        assert not saved
        with torch.enable_grad():
            layer.requires_grad_(True)(x, mask)
        assert saved
    assert not y.requires_grad
    assert torch.equal(y, layer(x, mask))


def test_training_after_the_first_call_in_inference_mode(make_build: BuildFactory) -> None:
    layer = make_build(fresh=True).layer()
    x = torch.randn(2, 3, 8, requires_grad=True)
    with torch.inference_mode():
        layer(x.detach())
    layer(x).sum().backward()
    assert x.grad is not None


def test_used_twice_in_one_graph(build64: FakeBuild, layer64: StepdownLayer) -> None:
    layer64.eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    y, expected = layer64(0.1 * layer64(x)), build64.expected(layer64, 0.1 * build64.expected(layer64, x))
    torch.testing.assert_close(y, expected)
    assert_same(gradients(y, layer64, x), gradients(expected, layer64, x))


def test_several_layers_share_a_binary(build64: FakeBuild) -> None:
    layers = [build64.layer().eval() for _ in range(3)]
    assert len({id(layer._binding) for layer in layers}) == 1
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    y = expected = x
    for layer in layers:
        y, expected = torch.tanh(layer(y)), torch.tanh(build64.expected(layer, expected))
    torch.testing.assert_close(y, expected)
    stack = nn.ModuleList(layers)
    assert_same(gradients(y, stack, x), gradients(expected, stack, x))


def test_backward_twice(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    y = layer(x, mask)
    first = torch.autograd.grad(y.sum(), [x, *layer.parameters()], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.parametrize("which", ["x", "output.LayerNorm.weight", "mask"])
def test_changes_between_forward_and_backward_are_noticed(layer: StepdownLayer, batch: Batch, which: str) -> None:
    x, mask = batch
    y = layer(x, mask)
    with torch.no_grad():
        {"x": x, "mask": mask, **dict(layer.named_parameters())}[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_refused(layer: StepdownLayer, batch: Batch) -> None:
    x, _ = batch
    (dx,) = torch.autograd.grad(layer(x).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# Dropout


def test_seeds_repeat_dropout(layer: StepdownLayer, batch: Batch) -> None:
    x, _ = batch
    torch.manual_seed(3)
    first, rng = layer(x), layer.last_rng
    second = layer(x)
    assert not torch.equal(first, second)
    assert rng is not None
    assert rng.dtype is torch.int64
    assert rng.shape == (2,)
    assert layer.last_rng is not None
    assert not torch.equal(rng, layer.last_rng)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert torch.equal(layer.last_rng, rng)
    layer.last_rng.zero_()
    assert torch.equal(layer.last_rng, rng)


def test_backward_uses_the_masks_of_its_forward(build64: FakeBuild, layer64: StepdownLayer) -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    y = layer64(x)
    layer64(x)
    with torch.no_grad():
        zero, full = build64.expected(layer64, x, keep=torch.zeros_like(x)), build64.expected(layer64, x)
        keep = (y - zero) / (full - zero)
    assert sorted({round(value, 6) for value in keep.flatten().tolist()}) == [0, round(4 / 3, 6)]
    assert 0.1 < (keep < 0.5).double().mean() < 0.4
    expected = build64.expected(layer64, x, keep=keep)
    assert_same(gradients(y, layer64, x), gradients(expected, layer64, x), rtol=1e-9, atol=1e-9)


def test_generator_is_left_alone_without_dropout(layer: StepdownLayer, batch: Batch) -> None:
    x, _ = batch
    state = torch.get_rng_state()
    layer.eval()(x)
    assert layer.last_rng is None
    layer.train()
    layer.definition = dataclasses.replace(layer.definition, dropout=0.0)
    layer(x)
    assert layer.last_rng is None
    with pytest.raises(InputError):
        layer(x[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_probabilities_are_read_at_run_time(build32: FakeBuild, layer: StepdownLayer) -> None:
    x = torch.randn(20, 20, 8)
    epsilon = build32.expected(layer, x, keep=torch.zeros_like(x))
    for probability in (0.5, 0.0, 0.9):
        layer.definition = dataclasses.replace(layer.definition, dropout=probability)
        dropped = torch.isclose(layer(x), epsilon).float().mean().item()
        assert abs(dropped - probability) < 0.05
    with pytest.raises(
        InputError, match=r"embed=16 was given to a layer built with 8; accepted are changes of \"dropout\""
    ):
        layer.definition = EncoderLayer(embed=16, heads=2, ffn=12)
    with pytest.raises(InputError, match=r"attention_dropout=0\.3 was given to a layer built with 0\.0"):
        layer.definition = dataclasses.replace(layer.definition, attention_dropout=0.3)
    assert layer.definition.dropout == 0.9


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_dropout(layer: StepdownLayer, batch: Batch, reentrant: bool) -> None:
    x, mask = batch
    torch.manual_seed(1)
    plain = gradients(layer(x, mask), layer, x)
    torch.manual_seed(1)
    y = checkpoint(layer, x, mask, use_reentrant=reentrant)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    found = {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    for name, value in found.items():
        assert value is not None
        assert torch.equal(value, plain[name]), name


def test_saved_tensors_can_be_moved(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    layer.eval()
    expected = gradients(layer(x, mask), layer, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        y = layer(x, mask)
    assert_same(gradients(y, layer, x), expected, rtol=0, atol=0)


# State


def test_names_shapes_and_order(build32: FakeBuild) -> None:
    layer, reference = StepdownLayer(build32.path), ReferenceEncoderLayer(SMALL)
    found = {name: parameter.shape for name, parameter in layer.named_parameters()}
    expected = {name: parameter.shape for name, parameter in reference.named_parameters()}
    assert list(found.items()) == list(expected.items())
    assert reference.load_state_dict(layer.state_dict()).missing_keys == []
    assert layer.load_state_dict(reference.state_dict()).unexpected_keys == []
    assert not list(layer.buffers())


def test_no_biases(make_build: BuildFactory) -> None:
    definition = dataclasses.replace(SMALL, bias=False)
    build = make_build(definition=definition)
    layer = build.layer().eval()
    assert list(layer.state_dict()) == list(definition.parameters())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(x), build.expected(layer, x))


def test_initial_values(make_build: BuildFactory) -> None:
    build = make_build(definition=EncoderLayer(embed=64, heads=4, ffn=128))
    torch.manual_seed(5)
    layer = StepdownLayer(build.path)
    torch.manual_seed(5)
    again = StepdownLayer(build.path)
    for (name, value), other in zip(layer.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(value, other)
        if name.endswith("bias"):
            assert not value.any()
        elif "LayerNorm" in name:
            assert bool((value == 1).all())
        else:
            assert abs(value.std().item() - 0.02) < 0.002
    wide = StepdownLayer(build.path, deviation=0.5, generator=torch.Generator().manual_seed(1))
    assert wide.output.dense.weight.std() > 0.4


def test_repr(layer: StepdownLayer) -> None:
    text = repr(layer)
    assert "embed=8, heads=2, ffn=12, activation='gelu'" in text
    assert "dropout=0.25" in text
    assert "dtype='float32', batch=None, seq=None, target='cpu'" in text
    assert "weight=[12, 8], bias=[12]" in text


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(layer: StepdownLayer, batch: Batch, how: str) -> None:
    x, mask = batch
    layer.definition = dataclasses.replace(layer.definition, dropout=0.5)
    layer(x)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert other.definition == layer.definition
    torch.manual_seed(2)
    expected = layer(x, mask)
    torch.manual_seed(2)
    assert torch.equal(other(x, mask), expected)
    with torch.no_grad():
        other.output.LayerNorm.bias.add_(1)
    torch.manual_seed(2)
    assert torch.equal(layer(x, mask), expected)
    torch.manual_seed(2)
    torch.testing.assert_close(other(x, mask), expected + 1)


def test_a_pickled_layer_without_its_build(make_build: BuildFactory) -> None:
    build = make_build(fresh=True)
    data = pickle.dumps(build.layer())
    manifest = build.path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace(f'"key": "{build.path.name}"', '"key": "other"'))
    for library in ("forward", "backward"):  # a new build has new files
        path = build.path / "lib" / f"{library}.so"
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").rename(path)
    with pytest.raises(BuildError, match="holds another build than the one that the pickled layer was made with"):
        pickle.loads(data)
    manifest.unlink()
    with pytest.raises(BuildError, match=r"manifest\.json"):
        pickle.loads(data)


def test_functional_call_parametrization_and_new_parameters(build64: FakeBuild, layer64: StepdownLayer) -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    layer64.eval()
    layer64.output.LayerNorm.weight = nn.Parameter(torch.randn(8, dtype=torch.float64))
    torch.testing.assert_close(layer64(x), build64.expected(layer64, x))
    swapped = {name: torch.randn_like(value) for name, value in layer64.named_parameters()}
    y = torch.func.functional_call(layer64, swapped, (x,))
    other = copy.deepcopy(layer64)
    other.load_state_dict(swapped)
    assert torch.equal(y, other(x))

    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    weight = layer64.output.LayerNorm.weight
    expected = copy.deepcopy(layer64)
    with torch.no_grad():
        expected.output.LayerNorm.weight.mul_(2)
    nn.utils.parametrize.register_parametrization(layer64.output.LayerNorm, "weight", Double())
    assert torch.equal(layer64(x), expected(x))
    layer64(x).sum().backward()
    expected(x).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * expected.output.LayerNorm.weight.grad)


def test_parameters_with_other_strides(build64: FakeBuild, layer64: StepdownLayer) -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    expected = gradients(layer64.eval()(x), layer64, x)
    weight = layer64.attention.output.LayerNorm.weight
    weight.data = torch.stack([weight.data, weight.data], 1)[:, 0]
    dense = layer64.output.dense.weight
    dense.data = dense.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert_same(gradients(layer64(x), layer64, x), expected, rtol=0, atol=0)


def test_tied_parameters(build64: FakeBuild, layer64: StepdownLayer) -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    layer64.eval().output.LayerNorm.weight = layer64.attention.output.LayerNorm.weight
    y, expected = layer64(x), build64.layer().eval()
    expected.load_state_dict(layer64.state_dict())
    y.sum().backward()
    expected(x.detach()).sum().backward()
    both = expected.output.LayerNorm.weight.grad + expected.attention.output.LayerNorm.weight.grad
    torch.testing.assert_close(layer64.output.LayerNorm.weight.grad, both)


# Threads and processes


def test_threads(build64: FakeBuild) -> None:
    """Several threads with shapes of their own, sharing one module, forward and backward."""
    layer = build64.layer().eval()
    wrong: list[object] = []

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for step in range(25):
            x = torch.randn(1 + number, 2 + step % 5, 8, dtype=torch.float64, generator=generator).requires_grad_()
            try:
                y, expected = layer(x), build64.expected(layer, x)
                torch.testing.assert_close(y, expected)
                assert_same(gradients(y, layer, x), gradients(expected, layer, x))
            except Exception as error:  # noqa: BLE001 - reported by the main thread
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_distributed(layer: StepdownLayer, batch: Batch, tmp_path: Path) -> None:
    x, mask = batch
    layer.eval()
    expected = gradients(layer(x, mask), layer, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(layer)
        y = wrapped(x, mask)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    finally:
        torch.distributed.destroy_process_group()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_compiled_model_calls_the_layer(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    model = nn.Sequential(nn.Linear(8, 8), layer.eval(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert x.grad is not None
    alone = torch.compile(layer, backend="eager")
    assert torch.equal(alone(x, mask), layer(x, mask))


def test_autocast_leaves_the_layer_alone(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    expected = layer.eval()(x, mask)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, mask)
    assert torch.equal(y, expected)
    y.sum().backward()


def test_default_dtype_and_device_do_not_matter(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    expected = layer.eval()(x, mask)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            y = layer.train()(x, mask) * 0 + layer.eval()(x, mask)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, expected)
    y.sum().backward()


def test_large_calls_use_memory_again(make_build: BuildFactory) -> None:
    layer = make_build().layer().eval()
    x = torch.randn(64, 1024, 8, requires_grad=True)
    y = layer(x)
    first = torch.autograd.grad(y.sum(), [x, *layer.parameters()], retain_graph=True)
    for _ in range(3):
        layer(torch.randn_like(x)).sum().backward()
    assert all(map(torch.equal, first, torch.autograd.grad(y.sum(), [x, *layer.parameters()])))


def test_memory_comes_home_with_the_graph(make_build: BuildFactory) -> None:
    layer, x = make_build().layer().eval(), torch.randn(64, 1024, 8, requires_grad=True)
    y = layer(x)
    lent = pool().idle_bytes()
    torch.autograd.grad(y.sum(), [x])  # frees what was saved, though "y" lives on
    assert pool().idle_bytes() >= lent + x.nbytes
    y = layer(x)
    lent = pool().idle_bytes()
    del y
    assert pool().idle_bytes() >= lent + x.nbytes
    release_memory()
    assert pool().idle_bytes() == 0


def test_gradients_of_a_batch_of_gradients_are_refused(layer: StepdownLayer, batch: Batch) -> None:
    x, mask = batch
    with pytest.raises(RuntimeError, match="accepted are those, one at a time"):
        torch.autograd.grad(layer(x, mask), [x], torch.ones(2, 3, 5, 8), is_grads_batched=True)


def test_python_runs_on_during_a_call(make_build: BuildFactory) -> None:
    layer, x = make_build().layer(), torch.randn(64, 1024, 8)
    worker = threading.Thread(target=lambda: [layer(x) for _ in range(10)])
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 15  # a call holding the lock would let this thread have one turn between two calls


def test_a_refused_export_leaves_the_layer_as_it_was(build32: FakeBuild) -> None:
    layer, x = build32.layer().eval(), torch.randn(2, 3, 8)
    before = layer(x)
    with pytest.raises(Exception, match=r"compiled layer|FakeTensor"):
        torch.export.export(layer, (x,))
    assert torch.equal(layer(x), before)
