"""A BERT for masked-language-model training, from a preset."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.presets import Preset
from stepdown.pipeline.compiler import CompiledLayer, compile_layer
from stepdown.pipeline.training.hugging_face import ACTIVATIONS, LayerFactory, replace_encoder_layers
from stepdown.pipeline.training.options import TrainingOptions


class CompiledLayers:
    """Makes encoder layers; those of one definition share one compiled library.

    :param batch: the batch size that the library is compiled for; ``None``: any.
    :param seq: the same for the length.
    :param dtype: of weights and activations.
    :param progress: called with the name of each stage of the compilation that begins.
    """

    def __init__(
        self, *, batch: int | None, seq: int | None, dtype: str, progress: Callable[[str], None] = lambda stage: None
    ) -> None:
        self._batch, self._seq, self._dtype, self._progress = batch, seq, dtype, progress
        self._compiled: dict[EncoderLayer, CompiledLayer] = {}

    def compiled(self, definition: EncoderLayer) -> CompiledLayer:
        """The compiled layer, built (or found in the build cache) at the first call."""
        if definition not in self._compiled:
            self._compiled[definition] = compile_layer(
                definition, batch=self._batch, seq=self._seq, dtype=self._dtype, progress=self._progress
            )
        return self._compiled[definition]

    def __call__(self, definition: EncoderLayer) -> nn.Module:
        """A new module with its own weights."""
        return self.compiled(definition).to_torch()

    @property
    def build(self) -> Path | None:
        """The folder of the first compiled layer."""
        return next((compiled.path for compiled in self._compiled.values()), None)


def bert_config(preset: Preset, *, vocabulary: int, dropout: float | None = None) -> BertConfig:
    """Hugging Face's configuration of the model that ``preset`` describes.

    :param vocabulary: how many tokens the tokenizer has.
    :param dropout: replaces every dropout probability; ``None``: the preset's.
    :raises OptionError: when the preset's layer is not one that Hugging Face's BERT has.
    """
    layer = preset.layer
    for name, given, accepted in (
        ("norm", layer.norm, "post"),
        ("bias", layer.bias, True),
        ("causal", layer.causal, False),
        ("activation_dropout", layer.activation_dropout, 0.0),
    ):
        if given != accepted:
            raise OptionError(f'The layer of "{preset.name}" has {name}={given!r}; BERT training accepts {accepted!r}.')
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == layer.activation)
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=layer.embed,
        num_hidden_layers=preset.layers,
        num_attention_heads=layer.heads,
        intermediate_size=layer.ffn,
        hidden_act=activation,
        hidden_dropout_prob=layer.dropout if dropout is None else dropout,
        attention_probs_dropout_prob=layer.attention_dropout if dropout is None else dropout,
        max_position_embeddings=preset.positions,
        layer_norm_eps=layer.eps,
    )


def build_model(options: TrainingOptions, vocabulary: int, make_layer: LayerFactory) -> BertForMaskedLM:
    """The model of ``options`` in training mode, its weights drawn from ``options.seed``.

    PyTorch's generator is left seeded with ``options.seed``, whatever the layers drew: dropout of equal seeds starts
    from the same state with every backend.
    """
    torch.manual_seed(options.seed)
    model = BertForMaskedLM(bert_config(options.preset, vocabulary=vocabulary, dropout=options.dropout))
    model.to(resolve_dtype(options.dtype).torch)
    if options.backend == "stepdown":
        replace_encoder_layers(model, make_layer)
    torch.manual_seed(options.seed)
    return model.train()


def weights_digest(model: nn.Module) -> str:
    """A SHA-256 of all parameters, names included."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
