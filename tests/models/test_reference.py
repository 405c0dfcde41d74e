"""The plain PyTorch layer against Hugging Face's BertLayer, nn.TransformerEncoderLayer, and its own promises."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from stepdown.models import EncoderLayer, ReferenceEncoderLayer, bert_tiny
from stepdown.models.definition import ACTIVATIONS
from stepdown.models.errors import InputError, OptionError
from stepdown.models.reference import AttentionKind, attention_pattern

KINDS: tuple[AttentionKind, ...] = ("eager", "sdpa")
SMALL = EncoderLayer(embed=24, heads=3, ffn=35, eps=1e-5)


def randomised(layer: ReferenceEncoderLayer) -> ReferenceEncoderLayer:
    """The layer with every parameter drawn, so that no bias is zero and no factor one."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1 if name.endswith("LayerNorm.weight") else 0, 0.3)
    return layer


def gradients(module: nn.Module, y: Tensor, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    names = ["x", *(name for name, _ in module.named_parameters())]
    return dict(zip(names, torch.autograd.grad(y, [x, *module.parameters()], upstream), strict=True))


def masks(batch: int, seq: int) -> list[Tensor | None]:
    right = torch.arange(seq) < torch.tensor([[seq], [2], [seq - 1]])[:batch]
    holes = torch.ones(batch, seq, dtype=torch.bool)
    holes[:, 1::3] = False
    return [None, right, right.flip(1), holes, right.long()]


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_the_definition(bias: bool) -> None:
    definition = EncoderLayer(embed=24, heads=3, ffn=35, bias=bias)
    layer = ReferenceEncoderLayer(definition)
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {name: parameter.shape for name, parameter in definition.parameters().items()}
    assert list(shapes) == list(definition.parameters())


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_hugging_face(hidden_act: str, kind: AttentionKind) -> None:
    activation = "gelu_tanh" if hidden_act == "gelu_new" else hidden_act
    definition = EncoderLayer(embed=24, heads=3, ffn=35, activation=activation)
    config = BertConfig(hidden_size=24, num_attention_heads=3, intermediate_size=35, hidden_act=hidden_act)
    config._attn_implementation = "eager"
    theirs = BertLayer(config).double().eval()
    ours = randomised(ReferenceEncoderLayer(definition, kind)).double().eval()
    theirs.load_state_dict(ours.state_dict())
    for mask in masks(3, 7):
        x = torch.randn(3, 7, 24, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn_like(x)
        additive = None
        if mask is not None:
            additive = torch.zeros(3, 1, 1, 7, dtype=torch.float64)
            additive.masked_fill_(mask[:, None, None, :] == 0, torch.finfo(torch.float64).min)
        expected, y = theirs(x, attention_mask=additive), ours(x, mask)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        wanted = gradients(theirs, expected, x, upstream)
        for name, value in gradients(ours, y, x, upstream).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-11, msg=name)


def test_state_dict_loads_both_ways() -> None:
    layer, preset = ReferenceEncoderLayer(bert_tiny.layer), bert_tiny.layer
    theirs = BertLayer(
        BertConfig(hidden_size=preset.embed, num_attention_heads=preset.heads, intermediate_size=preset.ffn)
    )
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(randomised(layer).state_dict())
    x = torch.randn(2, 5, preset.embed)
    torch.testing.assert_close(layer.eval()(x), theirs.eval()(x))


NAMES_IN_PYTORCH = {
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
}


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_transformer_encoder_layer(norm: str, activation: str, bias: bool, causal: bool) -> None:
    definition = EncoderLayer(
        embed=24, heads=3, ffn=35, activation=activation, norm=norm, eps=1e-5, bias=bias, causal=causal
    )
    ours = randomised(ReferenceEncoderLayer(definition)).double().eval()
    state = ours.state_dict()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": nn.GELU(approximate="tanh"),
    }
    # bias=False would take the biases of its layer normalizations as well, so zeros are loaded where there is none.
    theirs = nn.TransformerEncoderLayer(
        24, 3, 35, activation=functions[activation], norm_first=norm == "pre", batch_first=True, dtype=torch.float64
    )
    loaded = {
        f"{theirs_name}.{kind}": state.get(f"{name}.{kind}")
        for name, theirs_name in NAMES_IN_PYTORCH.items()
        for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        parts = [state.get(f"attention.self.{name}.{kind}") for name in ("query", "key", "value")]
        loaded[f"self_attn.in_proj_{kind}"] = (
            torch.cat([p for p in parts if p is not None]) if parts[0] is not None else None
        )
    theirs.load_state_dict(
        {
            name: torch.zeros_like(value) if loaded[name] is None else loaded[name]
            for name, value in theirs.state_dict().items()
        }
    )
    theirs.train()  # The other path of evaluation mode ignores src_mask's type; dropout is switched off instead.
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    padding = torch.arange(7) >= torch.tensor([[7], [3]])
    blocked = ~torch.ones(7, 7, dtype=torch.bool).tril() if causal else None
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    y, expected = ours(x, ~padding), theirs(x, src_mask=blocked, src_key_padding_mask=padding)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    wanted = gradients(theirs, expected, x, upstream)
    found = gradients(ours, y, x, upstream)
    torch.testing.assert_close(found["x"], wanted["x"], rtol=1e-11, atol=1e-11)
    for name, theirs_name in NAMES_IN_PYTORCH.items():
        torch.testing.assert_close(
            found[f"{name}.weight"], wanted[f"{theirs_name}.weight"], rtol=1e-11, atol=1e-11, msg=name
        )


def fully_masked_second_row() -> Tensor:
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    mask[2, :2] = False
    return mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_query_without_keys_gets_no_context_and_gives_no_gradient(
    kind: AttentionKind, causal: bool, dtype: torch.dtype
) -> None:
    definition = EncoderLayer(embed=24, heads=3, ffn=35, causal=causal, norm="pre", eps=1e-5)
    layer = randomised(ReferenceEncoderLayer(definition, kind)).to(dtype).eval()
    contexts: list[Tensor] = []
    layer.attention.output.dense.register_forward_pre_hook(lambda module, inputs: contexts.append(inputs[0]))
    values: list[Tensor] = []
    layer.attention.self.value.register_forward_hook(lambda module, inputs, output: values.append(output))
    x = torch.randn(3, 6, 24, dtype=dtype, requires_grad=True)
    y = layer(x, fully_masked_second_row())
    grad_value, grad_x = torch.autograd.grad(contexts[0].sum(), [values[0], x], retain_graph=True)
    assert torch.equal(contexts[0][1], torch.zeros_like(contexts[0][1]))
    assert not grad_value[1].any() and not grad_x[1].any()
    assert contexts[0][0].abs().min() > 0
    # Queries of the third row: with a causal layer, the first two have no key left.
    assert bool(contexts[0][2, :2].any()) is not causal
    assert all(value.isfinite().all() for value in gradients(layer, y, x, torch.ones_like(y)).values())


def test_masked_keys_have_no_influence() -> None:
    layer = randomised(ReferenceEncoderLayer(SMALL)).double().eval()
    mask = masks(3, 7)[3]
    assert mask is not None
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    other = x + (~mask)[:, :, None] * torch.randn_like(x)
    assert torch.equal(layer(x, mask)[mask], layer(other, mask)[mask])
    assert not torch.equal(layer(x)[mask], layer(other)[mask])


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_equals_eager(causal: bool) -> None:
    definition = EncoderLayer(embed=24, heads=3, ffn=35, causal=causal)
    eager = randomised(ReferenceEncoderLayer(definition)).double().eval()
    sdpa = ReferenceEncoderLayer(definition, "sdpa").double().eval()
    sdpa.load_state_dict(eager.state_dict())
    for mask in [*masks(3, 6), fully_masked_second_row()]:
        x = torch.randn(3, 6, 24, dtype=torch.float64, requires_grad=True)
        expected, y = eager(x, mask), sdpa(x, mask)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        wanted = gradients(eager, expected, x, torch.ones_like(x))
        for name, value in gradients(sdpa, y, x, torch.ones_like(x)).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-11, msg=name)


def test_given_masks_drop_what_they_say() -> None:
    definition = EncoderLayer(
        embed=24, heads=3, ffn=35, norm="pre", dropout=0.25, attention_dropout=0.5, activation_dropout=0.2
    )
    layer = randomised(ReferenceEncoderLayer(definition)).double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    nothing = {site: torch.zeros(definition.dropout_shape(site, 2, 5), dtype=torch.bool) for site in range(4)}
    everything = {site: ~mask for site, mask in nothing.items()}
    assert torch.equal(layer(x, keep=nothing), x)
    # Only the feed-forward output dropped: what is left is the attention block, its output scaled by 1 / 0.75.
    attention_only = layer(x, keep={**everything, 3: nothing[3]}) - x
    inner = layer.attention.output.LayerNorm(x)
    projections = layer.attention.self
    query, key, value = (f(inner).view(2, 5, 3, 8) for f in (projections.query, projections.key, projections.value))
    weights = torch.einsum("bshp,bthp->bhst", query, key).div(8**0.5).softmax(-1) * 2
    context = torch.einsum("bhst,bthp->bshp", weights, value).flatten(2)
    torch.testing.assert_close(attention_only, layer.attention.output.dense(context) / 0.75)
    one_dropped = everything[3].clone()
    one_dropped[1, 2, 7] = False
    difference = layer(x, keep=everything) - layer(x, keep={**everything, 3: one_dropped})
    assert difference.nonzero().tolist() == [[1, 2, 7]]
    assert torch.equal(layer.eval()(x, keep=nothing), layer(x))


def test_drawn_masks_follow_the_generator() -> None:
    layer = randomised(ReferenceEncoderLayer(SMALL))
    x = torch.randn(2, 5, 24)
    torch.manual_seed(5)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_gradcheck_with_masks_and_dropout() -> None:
    definition = EncoderLayer(embed=6, heads=2, ffn=5, dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)
    layer = randomised(ReferenceEncoderLayer(definition)).double()
    keep = {site: torch.rand(definition.dropout_shape(site, 2, 3)) > 0.3 for site in range(4)}
    mask = torch.tensor([[True, True, False], [False, False, False]])
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *parameters: layer(x, mask, keep), (x, *layer.parameters()))


def test_wrong_inputs_are_refused() -> None:
    layer = ReferenceEncoderLayer(SMALL, "sdpa")
    x = torch.randn(2, 5, 24)
    with pytest.raises(InputError, match=r"x of shape \[2, 24\] was given; accepted is \[batch, seq, 24\]"):
        layer(x[:, 0])
    with pytest.raises(InputError, match=r"attention_mask of shape \[5, 2\] was given; accepted is \[2, 5\]"):
        layer(x, torch.ones(5, 2, dtype=torch.bool))
    with pytest.raises(InputError, match=r"attention_mask of torch\.float32 was given; accepted is a boolean"):
        layer(x, torch.ones(2, 5))
    with pytest.raises(InputError, match='accepted is that with attention="eager"'):
        layer(x, keep={0: torch.ones(2, 3, 5, 5, dtype=torch.bool)})
    with pytest.raises(InputError, match=r"shape \[2, 5, 23\] was given for site 1; accepted is \[2, 5, 24\]"):
        layer(x, keep={1: torch.ones(2, 5, 23, dtype=torch.bool)})
    with pytest.raises(OptionError, match='attention "flash" is unknown; accepted are "eager" and "sdpa"'):
        ReferenceEncoderLayer(SMALL, "flash")  # type: ignore[arg-type]


def test_attention_pattern() -> None:
    causal = EncoderLayer(embed=2, heads=1, ffn=1, causal=True)
    plain = EncoderLayer(embed=2, heads=1, ffn=1)
    mask = torch.tensor([[0, 2, 1]])
    assert attention_pattern(plain, 1, 3, None) is None
    pattern = attention_pattern(causal, 1, 3, mask)
    assert pattern is not None
    assert pattern[0, 0].tolist() == [[False, False, False], [False, True, False], [False, True, True]]
