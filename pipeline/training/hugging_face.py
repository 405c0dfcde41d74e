"""Hugging Face's BERT encoders with other encoder layers inside.

:func:`replace_encoder_layers` puts a :class:`StepdownEncoder` in the place of each ``BertEncoder`` or
``RobertaEncoder``. Its layers take the key-padding mask [B, S] itself, and are the encoder's direct children, so that
parameters keep their names and checkpoints load both ways.

Hugging Face spreads a padding mask over [B, 1, S, T] before its encoder sees it, and for that looks at the mask's
values on the host. Replaced models therefore ask for the attention implementation "stepdown", whose registered mask
function hands the [B, S] mask on as it is. Masks that a caller has spread himself are brought back where that is exact.

Dimension legend: `B` batch, `S` query position, `T` key position, `E` embedding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.models.roberta.modeling_roberta import RobertaEncoder
from transformers.utils.output_capturing import install_output_capuring_hook

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import DefinitionError, InputError

LayerFactory = Callable[[EncoderLayer], nn.Module]
"""Makes one encoder layer: a module with Hugging Face's parameter names, `forward(x, attention_mask=None)`."""

ATTENTION_IMPLEMENTATION = "stepdown"
"""The name under which the mask function is registered with Hugging Face."""

ENCODERS: tuple[type[nn.Module], ...] = (BertEncoder, RobertaEncoder)
"""Encoders whose layers are BERT's."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's name for each activation, and ours."""

_LEAST_MASKING = -1e4
"""An additive mask at or below this takes a key's weight to exactly zero in float32."""

_MASKS = "a boolean or integer key mask [B, S] (1: attend)"


def _pass_key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **_: object,
) -> Tensor | None:
    """Hugging Face's mask interface: returns the [B, S] mask unspread.

    :raises InputError: when another pattern than key padding is asked for.
    """
    if mask_function is not bidirectional_mask_function or q_length != kv_length:
        raise InputError(
            f"An attention pattern other than key padding was asked for, or {kv_length} keys for {q_length} queries; "
            f"accepted is {_MASKS}."
        )
    if attention_mask is not None and attention_mask.shape != (batch_size, kv_length):
        raise InputError(
            f"The attention mask has shape {tuple(attention_mask.shape)}; "
            f"accepted is {_MASKS} of shape {(batch_size, kv_length)}."
        )
    return attention_mask


ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_IMPLEMENTATION, _pass_key_mask)


def key_mask(mask: Tensor | None, batch: int, seq: int) -> Tensor | None:
    """``mask`` as key mask [B, S], True where a key may be attended to.

    Takes the mask itself [B, S], and a spread one [B or 1, heads or 1, S or 1, T], boolean or additive (0, or at most
    -10000), if every query and head of it has the same row. Where that depends on the mask's values they are looked at,
    on the CPU only: elsewhere that would make the host wait.

    :raises InputError: when no key mask says the same.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise InputError(f'The attention mask is a "{type(mask).__name__}"; accepted is {_MASKS}.')
    if mask.dim() == 2:
        return mask
    sizes = tuple(mask.shape)
    if mask.dim() != 4 or sizes[0] not in (1, batch) or sizes[2] not in (1, seq) or sizes[3] != seq:
        raise InputError(f"The attention mask has shape {sizes}; accepted is {_MASKS} of shape {(batch, seq)}.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f'The attention mask of shape {sizes} has dtype "{mask.dtype}"; accepted are boolean and additive masks '
            f"of that rank, or {_MASKS}."
        )
    attended = mask if mask.dtype == torch.bool else mask == 0
    row = attended[:, 0, 0, :]
    one_row = all(size == 1 or stride == 0 for size, stride in zip(mask.shape[1:3], mask.stride()[1:3], strict=True))
    if mask.is_floating_point() or not one_row:
        if mask.device.type != "cpu":
            raise InputError(
                f'The attention mask of shape {sizes} on "{mask.device}" cannot be checked without waiting for the '
                f"device; accepted there is {_MASKS}."
            )
        if mask.is_floating_point() and not bool(((mask == 0) | (mask <= _LEAST_MASKING)).all()):
            raise InputError(
                f"The additive attention mask has other values than 0 and masking ones (at most {_LEAST_MASKING:g}); "
                f"accepted is {_MASKS}."
            )
        if not bool((attended == row[:, None, None, :]).all()):
            raise InputError(f"The attention mask differs between queries or heads; accepted is {_MASKS}.")
    return row.expand(batch, seq)


class StepdownEncoder(nn.Module):
    """Stands where a ``BertEncoder`` stood, with ``layers`` as its layers.

    Gradient checkpointing is switched as in other Hugging Face modules and then recomputes every layer;
    ``output_hidden_states`` works, ``output_attentions`` is refused, because the weights are not kept.
    """

    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Tensor]

    def __init__(self, config: PreTrainedConfig, layers: list[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(layers)
        for layer in layers:
            install_output_capuring_hook(layer, "hidden_states", 0)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """The output of the last layer [B, S, E], for ``hidden_states`` [B, S, E].

        :raises InputError: when the mask is no key mask, or when decoder features or attention weights are asked for.
        """
        for name, given in (
            ("encoder_hidden_states", encoder_hidden_states),
            ("encoder_attention_mask", encoder_attention_mask),
            ("cache", options.get("cache", options.get("past_key_values"))),
        ):
            if given is not None:
                raise InputError(f'"{name}" was given; accepted are inputs of an encoder without cross-attention.')
        if options.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise InputError('"output_attentions" was asked for; the layers do not keep them, accepted is False.')
        mask = key_mask(attention_mask, hidden_states.shape[0], hidden_states.shape[1])
        checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.layer:
            if checkpointed:
                hidden_states = self._gradient_checkpointing_func(layer.__call__, hidden_states, mask)
            else:
                hidden_states = layer(hidden_states, mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


def encoder_definition(config: PreTrainedConfig) -> EncoderLayer:
    """The definition of the encoder layers that ``config`` describes.

    :raises DefinitionError: when they are no encoder layers of BERT's kind.
    """
    if config.is_decoder or config.add_cross_attention:
        raise DefinitionError(f'The model "{config.model_type}" is a decoder; accepted are encoders.')
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise DefinitionError(f'The model has position embeddings "{positions}"; accepted are "absolute" ones.')
    if config.hidden_act not in ACTIVATIONS:
        accepted = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise DefinitionError(f'The model has the activation "{config.hidden_act}"; accepted are {accepted}.')
    return EncoderLayer(
        embed=config.hidden_size,
        heads=config.num_attention_heads,
        ffn=config.intermediate_size,
        activation=ACTIVATIONS[config.hidden_act],
        norm="post",
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
    )


def replace_encoder_layers(model: PreTrainedModel, make_layer: LayerFactory) -> int:
    """Puts layers from ``make_layer`` in the place of every BERT encoder layer of ``model``, weights copied.

    The model is changed in place: its modes, frozen parameters, parameter names and outputs stay the same.

    :returns: how many layers were replaced.
    :raises DefinitionError: when ``model`` has no BERT encoder, or layers that ``make_layer`` cannot stand in for.
    """
    found: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, ENCODERS)
    ]
    if not found:
        accepted = ", ".join(f'"{encoder.__name__}"' for encoder in ENCODERS)
        raise DefinitionError(f'The model "{type(model).__name__}" has no encoder to replace; accepted are {accepted}.')
    replaced = 0
    for name, encoder in found:
        definition = encoder_definition(encoder.config)
        layers = [_layer_like(old, make_layer(definition)) for old in encoder.layer]
        substitute = StepdownEncoder(encoder.config, layers)
        substitute.training = encoder.training
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, substitute)
        encoder.config._attn_implementation = ATTENTION_IMPLEMENTATION
        replaced += len(layers)
    return replaced


def _layer_like(old: nn.Module, new: nn.Module) -> nn.Module:
    """``new`` with the weights, frozen parameters and mode of ``old``."""
    ours, theirs = dict(new.named_parameters()), dict(old.named_parameters())
    if ours.keys() != theirs.keys():
        differing = ", ".join(f'"{name}"' for name in sorted(ours.keys() ^ theirs.keys()))
        raise DefinitionError(f"The model's layer differs in {differing}; accepted are layers with BERT's parameters.")
    for name, parameter in theirs.items():
        if (parameter.shape, parameter.dtype) != (ours[name].shape, ours[name].dtype):
            raise DefinitionError(
                f'The model\'s parameter "{name}" is {_described(parameter)}; '
                f"accepted is {_described(ours[name])}, which the layer was compiled for."
            )
    new.load_state_dict(old.state_dict())
    for name, parameter in theirs.items():
        ours[name].requires_grad_(parameter.requires_grad)
    return new.train(old.training)


def _described(parameter: Tensor) -> str:
    return f'"{str(parameter.dtype).removeprefix("torch.")}" {tuple(parameter.shape)}'
