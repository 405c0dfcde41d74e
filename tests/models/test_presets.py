"""Presets: published sizes, agreement with Hugging Face's configurations, and unknown names."""

import pytest
from transformers import BertConfig, RobertaConfig

from stepdown import models
from stepdown.models import PRESETS, find_preset
from stepdown.models.errors import OptionError


@pytest.mark.parametrize(
    ("name", "embed", "layers", "heads", "ffn"),
    [
        ("bert-tiny", 128, 2, 2, 512),
        ("bert-mini", 256, 4, 4, 1024),
        ("bert-small", 512, 4, 8, 2048),
        ("bert-medium", 512, 8, 8, 2048),
        ("bert-base", 768, 12, 12, 3072),
        ("bert-large", 1024, 24, 16, 4096),
        ("roberta-base", 768, 12, 12, 3072),
        ("minilm", 384, 6, 12, 1536),
    ],
)
def test_published_sizes(name: str, embed: int, layers: int, heads: int, ffn: int) -> None:
    preset = find_preset(name)
    assert (preset.layer.embed, preset.layers, preset.layer.heads, preset.layer.ffn) == (embed, layers, heads, ffn)
    assert getattr(models, name.replace("-", "_")) is preset
    assert preset.name == name


def test_every_preset_is_in_the_table_above() -> None:
    assert len(PRESETS) == 8


def test_bert_base_is_hugging_faces_default() -> None:
    config, preset = BertConfig(), models.bert_base
    layer = preset.layer
    assert (layer.embed, layer.heads, layer.ffn) == (
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
    )
    assert (layer.activation, layer.eps, layer.dropout, layer.attention_dropout) == (
        config.hidden_act,
        config.layer_norm_eps,
        config.hidden_dropout_prob,
        config.attention_probs_dropout_prob,
    )
    assert (preset.layers, preset.vocabulary, preset.positions) == (
        config.num_hidden_layers,
        config.vocab_size,
        config.max_position_embeddings,
    )


def test_roberta_base() -> None:
    assert models.roberta_base.vocabulary == RobertaConfig().vocab_size
    assert models.roberta_base.layer.eps == 1e-5


@pytest.mark.parametrize("name", ["bert_base", "BERT-Base", " bert-base "])
def test_spelling_of_names_is_forgiven(name: str) -> None:
    assert find_preset(name) is models.bert_base


def test_unknown_preset_lists_close_matches() -> None:
    with pytest.raises(OptionError, match='preset "bert-lage" is unknown; close to it are "bert-large"'):
        find_preset("bert-lage")
    with pytest.raises(OptionError, match=r'preset "xyzzy" is unknown; accepted are "bert-tiny", .*"minilm"'):
        find_preset("xyzzy")
