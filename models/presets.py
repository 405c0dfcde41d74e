"""Published layer sizes by name.

Sources: BERT, Devlin et al. 2018 (arXiv 1810.04805) for base and large, Turc et al. 2019 (arXiv 1908.08962) for tiny to
medium; RoBERTa, Liu et al. 2019 (arXiv 1907.11692); MiniLM, Wang et al. 2020 (arXiv 2002.10957), in the six-layer form
of the `all-MiniLM-L6-v2` sentence encoder.
"""

import difflib
from dataclasses import dataclass

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError


@dataclass(frozen=True)
class Preset:
    """A published model: its encoder layer, and what stands around that layer.

    ``layers`` is the number of encoder layers, ``vocabulary`` the number of tokens and ``positions`` the number of rows
    of the position embedding.
    """

    name: str
    layer: EncoderLayer
    layers: int
    vocabulary: int
    positions: int


def _bert(name: str, *, embed: int, layers: int, heads: int) -> Preset:
    layer = EncoderLayer(embed=embed, heads=heads, ffn=4 * embed, activation="gelu", norm="post", eps=1e-12)
    return Preset(name, layer, layers=layers, vocabulary=30522, positions=512)


bert_tiny = _bert("bert-tiny", embed=128, layers=2, heads=2)
bert_mini = _bert("bert-mini", embed=256, layers=4, heads=4)
bert_small = _bert("bert-small", embed=512, layers=4, heads=8)
bert_medium = _bert("bert-medium", embed=512, layers=8, heads=8)
bert_base = _bert("bert-base", embed=768, layers=12, heads=12)
bert_large = _bert("bert-large", embed=1024, layers=24, heads=16)
roberta_base = Preset(
    "roberta-base",
    EncoderLayer(embed=768, heads=12, ffn=3072, activation="gelu", norm="post", eps=1e-5),
    layers=12,
    vocabulary=50265,
    positions=514,
)
minilm = _bert("minilm", embed=384, layers=6, heads=12)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (bert_tiny, bert_mini, bert_small, bert_medium, bert_base, bert_large, roberta_base, minilm)
}
"""Every preset by its name."""


def find_preset(name: str) -> Preset:
    """The preset called ``name``; case and the choice of ``-`` or ``_`` do not matter.

    :raises OptionError: when there is none; the message lists names close to it, or else all of them.
    """
    wanted = name.strip().lower().replace("_", "-")
    if wanted in PRESETS:
        return PRESETS[wanted]
    close = difflib.get_close_matches(wanted, PRESETS, n=3)
    listed = ", ".join(f'"{match}"' for match in close or PRESETS)
    raise OptionError(f'preset "{name}" is unknown; {"close to it are" if close else "accepted are"} {listed}.')
