"""Compiled layers in PyTorch: gradients, Hugging Face's layer, seeds, checkpointing, threads.

What a build computes is measured against float64 in `tests/pipeline/verification`; here it is what PyTorch makes of it.
"""

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import InputError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import CompiledLayer, compile_layer
from stepdown.pipeline.runtime import StepdownLayer

POST = EncoderLayer(embed=24, heads=2, ffn=40, activation_dropout=0.1)
PRE = dataclasses.replace(POST, norm="pre", activation="gelu_tanh", causal=True, bias=False, eps=1e-5)

Compile = Callable[..., CompiledLayer]


@pytest.fixture(scope="session")
def compiled() -> Compile:
    """`compiled(definition, dtype)`: a light build for any batch and length, made once."""
    made: dict[tuple[EncoderLayer, str], CompiledLayer] = {}

    def get(definition: EncoderLayer = POST, dtype: str = "float32") -> CompiledLayer:
        if (definition, dtype) not in made:
            made[definition, dtype] = compile_layer(definition, dtype=dtype, optimize="light")
        return made[definition, dtype]

    return get


def fresh(build: CompiledLayer, **options: Any) -> StepdownLayer:
    """A layer whose parameters are far enough from zero, and normalizations from one, to tell them apart."""
    layer = build.to_torch(**options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1 if "LayerNorm.weight" in name else 0, 0.2)
    return layer


def reference_of(layer: StepdownLayer) -> ReferenceEncoderLayer:
    """The same layer in plain PyTorch, in float64."""
    reference = ReferenceEncoderLayer(layer.definition).double().train(layer.training)
    reference.load_state_dict(layer.state_dict())
    return reference


def padded(batch: int, seq: int) -> Tensor:
    """A mask `[batch, seq]` with padding anywhere, and a whole sequence of it where there is more than one."""
    mask = torch.rand(batch, seq) < 0.7
    mask[0] = True
    mask[1:2] = False
    return mask


def derivatives(layer: nn.Module, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The output, and every gradient of its weighted sum."""
    y = layer(x, mask)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], weights)]


@pytest.mark.parametrize("definition", [POST, PRE], ids=["post", "pre"])
def test_gradcheck(compiled: Compile, definition: EncoderLayer) -> None:
    layer = fresh(compiled(definition, "float64")).eval()
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.slow
def test_gradcheck_of_every_element(compiled: Compile) -> None:
    layer = fresh(compiled(POST, "float64")).eval()
    x = torch.randn(1, 2, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,))
    bias = layer.get_parameter("attention.output.dense.bias")
    assert torch.autograd.gradcheck(
        lambda bias: torch.func.functional_call(layer, {"attention.output.dense.bias": bias}, (x.detach(),)), (bias,)
    )


@pytest.mark.parametrize("definition", [POST, PRE], ids=["post", "pre"])
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 7), (2, 16)])
def test_reference_in_float64(compiled: Compile, definition: EncoderLayer, batch: int, seq: int) -> None:
    """One binary for every shape, with padding, against plain PyTorch."""
    layer = fresh(compiled(definition, "float64")).eval()
    x, mask = torch.randn(batch, seq, 24, dtype=torch.float64, requires_grad=True), padded(batch, seq)
    found, expected = derivatives(layer, x, mask), derivatives(reference_of(layer), x, mask)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-10)


def bert_layer(definition: EncoderLayer) -> BertLayer:
    config = BertConfig(
        hidden_size=definition.embed,
        num_attention_heads=definition.heads,
        intermediate_size=definition.ffn,
        layer_norm_eps=definition.eps,
        hidden_act=definition.activation,
        hidden_dropout_prob=definition.dropout,
        attention_probs_dropout_prob=definition.attention_dropout,
        attn_implementation="eager",
    )
    return BertLayer(config)


def test_hugging_face_layer(compiled: Compile) -> None:
    layer, theirs = fresh(compiled()).eval(), bert_layer(POST).eval()
    names = [(name, value.shape) for name, value in theirs.named_parameters()]
    assert [(name, value.shape) for name, value in layer.named_parameters()] == names
    theirs.load_state_dict(layer.state_dict())
    x, mask = torch.randn(2, 9, 24, requires_grad=True), torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]

    def output_of(result: Any) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    y, expected = layer(x, mask), output_of(theirs(x, additive))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *theirs.parameters()])
    for (name, _), value, other in zip([("x", None), *names], found, wanted, strict=True):
        assert torch.allclose(value, other, rtol=1e-3, atol=1e-3), (name, (value - other).abs().max())
    # The other way round: their values in our layer.
    other_layer = compiled().to_torch().eval()
    other_layer.load_state_dict(theirs.state_dict())
    assert torch.equal(other_layer(x, mask), y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit(compiled: Compile, dtype: str) -> None:
    layer = fresh(compiled(dtype=dtype)).eval()
    reference = reference_of(layer)
    x = torch.randn(2, 5, 24, dtype=getattr(torch, dtype), requires_grad=True)
    wide = x.detach().double().requires_grad_()
    mask = padded(2, 5)
    epsilon = torch.finfo(x.dtype).eps
    for value, other in zip(derivatives(layer, x, mask), derivatives(reference, wide, mask), strict=True):
        assert value.dtype is x.dtype
        assert (value.double() - other).norm() < 8 * epsilon * max(other.norm().item(), 1)


def test_seeds(compiled: Compile) -> None:
    layer, x = fresh(compiled()), torch.randn(2, 5, 24, requires_grad=True)
    torch.manual_seed(11)
    first, rng = derivatives(layer, x, None), layer.last_rng
    second = derivatives(layer, x, None)
    torch.manual_seed(11)
    again = derivatives(layer, x, None)
    assert rng is not None
    assert layer.last_rng is not None
    assert torch.equal(layer.last_rng, rng)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], second[0])
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert layer.last_rng is None


def with_field(definition: EncoderLayer, field: str, value: float) -> EncoderLayer:
    return EncoderLayer.from_dict({**definition.to_dict(), field: value})


def test_probabilities_at_run_time(compiled: Compile) -> None:
    """Training without dropout is evaluation, in the binary that was built with dropout."""
    layer, x = fresh(compiled()), torch.randn(2, 5, 24)
    expected = layer.eval()(x)
    layer.train().definition = dataclasses.replace(POST, dropout=0, attention_dropout=0, activation_dropout=0)
    assert torch.equal(layer(x), expected)
    for field in ("dropout", "attention_dropout", "activation_dropout"):
        layer.definition = with_field(layer.definition, field, 0.5)
        assert not torch.allclose(layer(x), expected), field
        layer.definition = with_field(layer.definition, field, 0.0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(compiled: Compile, reentrant: bool) -> None:
    """Two layers one after the other: the recomputation draws the dropout masks of the first pass."""
    stack = nn.ModuleList(fresh(compiled()) for _ in range(2))
    x, mask = torch.randn(2, 5, 24, requires_grad=True), padded(2, 5)

    def run(use: bool) -> list[Tensor]:
        torch.manual_seed(4)
        y = x
        for layer in stack:
            y = checkpoint(layer, y, mask, use_reentrant=reentrant) if use else layer(y, mask)
        stack.zero_grad()
        x.grad = None
        y.square().sum().backward()
        return [y.detach(), *(value.grad.clone() for value in (x, *stack.parameters()) if value.grad is not None)]

    plain, recomputed = run(False), run(True)
    assert len(plain) == len(recomputed) == 2 + 32
    assert all(map(torch.equal, plain, recomputed))


def test_double_use_and_retained_graph(compiled: Compile) -> None:
    layer = fresh(compiled(dtype="float64")).eval()
    reference = reference_of(layer)
    x = torch.randn(2, 4, 24, dtype=torch.float64, requires_grad=True)
    y, expected = layer(layer(x)), reference(reference(x))
    first = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *reference.parameters()])
    for value, again, other in zip(first, second, wanted, strict=True):
        assert torch.equal(value, again)
        torch.testing.assert_close(value, other, rtol=1e-8, atol=1e-8)


def test_only_wanted_gradients(compiled: Compile) -> None:
    layer, x = fresh(compiled()).eval(), torch.randn(2, 5, 24, requires_grad=True)
    everything = dict(zip(["x", *dict(layer.named_parameters())], derivatives(layer, x, None)[1:], strict=True))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("LayerNorm" in name or "query" in name)
    y = layer(x.detach())
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).float())
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, everything[name])
        else:
            assert parameter.grad is None


def test_changes_in_place_are_noticed(compiled: Compile) -> None:
    layer, x = fresh(compiled()).eval(), torch.randn(2, 5, 24, requires_grad=True)
    for name in ("attention.self.query.weight", "output.dense.weight", "intermediate.dense.weight"):
        y = layer(x)
        with torch.no_grad():
            layer.get_parameter(name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_nan(compiled: Compile) -> None:
    x = torch.randn(3, 4, 24, requires_grad=True)
    with torch.no_grad():
        x[1, 2, 3] = torch.nan
    y = fresh(compiled()).eval()(x)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[1].isnan().any()
    assert not x.grad[[0, 2]].isnan().any()


def test_whole_sequences_of_padding(compiled: Compile) -> None:
    """No NaN where no key may be attended to; what is in padded positions does not reach the others."""
    layer, x = fresh(compiled()).eval(), torch.randn(2, 5, 24, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    first = derivatives(layer, x, mask)
    assert all(value.isfinite().all() for value in first)
    with torch.no_grad():
        x[0, 3:] = 100
    assert torch.equal(layer(x, mask)[0, :3], first[0][0, :3])


def test_threads(compiled: Compile) -> None:
    """Four threads at once with shapes of their own; every result is that of the thread alone."""
    layer = fresh(compiled()).eval()
    inputs = [torch.randn(1 + i, 3 + 2 * i, 24, requires_grad=True) for i in range(4)]
    expected = [derivatives(layer, x, None) for x in inputs]
    wrong: list[object] = []

    def work(index: int) -> None:
        for _ in range(10):
            try:
                found = derivatives(layer, inputs[index], None)
            except Exception as error:  # noqa: BLE001 - reported by the main thread
                wrong.append(error)
                return
            for value, other in zip(found, expected[index], strict=True):
                if not torch.allclose(value, other, rtol=1e-5, atol=1e-5):
                    wrong.append((index, value, other))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong[0]


def test_copies(compiled: Compile) -> None:
    layer, x = fresh(compiled()).eval(), torch.randn(2, 5, 24)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.get_parameter("output.dense.bias").add_(1)
        assert torch.equal(layer(x), expected)
        assert not torch.equal(other(x), expected)


def test_promised_sizes() -> None:
    layer = fresh(compile_layer(POST, batch=2, seq=6, optimize="light")).eval()
    x = torch.randn(2, 6, 24)
    torch.testing.assert_close(layer(x).double(), reference_of(layer)(x.double()), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match=r"x of shape \[2, 5, 24\] was given; accepted is \[2, 6, 24\], as promised"):
        layer(x[:, :5])


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 24), torch.zeros(2, 5, 23), torch.zeros(0, 5, 24), torch.zeros(2, 5, 24).double()],
    ids=["rank", "size", "empty", "dtype"],
)
def test_bad_input(compiled: Compile, x: Tensor) -> None:
    with pytest.raises(InputError, match="was given; accepted is"):
        compiled().to_torch()(x)
