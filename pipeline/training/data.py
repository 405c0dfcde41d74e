"""Text to masked batches: WordPiece, blocks, dynamic masking.

Everything a step sees is a function of the text, the seed and the step's number, so that a resumed run needs no state.

Dimension legend: `B` batch, `S` position, `N` blocks of the text.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor

from stepdown.pipeline.training.errors import TextError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Token 0 to 4."""

IGNORED = -100
"""The label of a position that is not to be predicted: PyTorch's `ignore_index`."""

_PAD, _UNKNOWN, _CLS, _SEP, _MASK = range(len(SPECIAL_TOKENS))
_ORDER, _MASKING = 0, 1  # streams of random numbers drawn from one seed


@dataclass(frozen=True)
class Text:
    """A text, where it came from, and a SHA-256 of its bytes."""

    path: Path
    content: str
    digest: str


def read_text(path: Path) -> Text:
    """Reads a UTF-8 file.

    :raises TextError: when it is missing, no file, unreadable, empty or not UTF-8.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise TextError(f'The text "{path}" does not exist; accepted is a UTF-8 file.') from None
    except OSError as error:
        raise TextError(f'The text "{path}" cannot be read ({error.strerror}); accepted is a UTF-8 file.') from None
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f'The text "{path}" is not UTF-8 at byte {error.start}; accepted is a UTF-8 file.') from None
    if not content.strip():
        raise TextError(f'The text "{path}" is empty; accepted is a UTF-8 file with words in it.')
    return Text(path, content, hashlib.sha256(raw).hexdigest())


def train_tokenizer(text: Text, vocabulary: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer of at most ``vocabulary`` tokens, learnt from ``text``.

    Normalisation and splitting are BERT's (Devlin et al. 2018): words and punctuation apart, accents dropped.
    """
    tokenizer = Tokenizer(WordPiece(unk_token=SPECIAL_TOKENS[_UNKNOWN]))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    trainer = WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        limit_alphabet=min(1000, vocabulary // 4),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.content.splitlines(), trainer)
    return tokenizer


def text_blocks(tokenizer: Tokenizer, text: Text, batch: int, seq: int) -> Tensor:
    """The text as full blocks `[CLS] ... [SEP]`, int64 [N, S]; what is left after the last full block is dropped.

    :raises TextError: when the text has fewer than ``batch`` blocks.
    """
    encodings: Iterable = tokenizer.encode_batch_fast(text.content.splitlines(), add_special_tokens=False)
    tokens = np.concatenate([np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings])
    body = seq - 2
    count = len(tokens) // body
    if count < batch:
        raise TextError(
            f'The text "{text.path}" has {len(tokens)} tokens, which make {count} blocks of {seq}; '
            f"accepted are texts with at least one batch, {batch} blocks."
        )
    blocks = np.empty((count, seq), dtype=np.int64)
    blocks[:, 0] = _CLS
    blocks[:, 1:-1] = tokens[: count * body].reshape(count, body)
    blocks[:, -1] = _SEP
    return torch.from_numpy(blocks)


@dataclass(frozen=True)
class MaskedBatch:
    """What the model reads and what it is to predict, both int64 [B, S]; labels are -100 where nothing is asked."""

    input_ids: Tensor
    labels: Tensor


class MaskedBatches:
    """Batches with dynamic masking: a block is masked anew each time it comes up.

    Of each block, ``fraction`` of the tokens (at least one, never `[CLS]` or `[SEP]`) are chosen without replacement;
    of the chosen, 80% become `[MASK]`, 10% a random token and 10% stay (Devlin et al. 2018, section 3.1 and A.1).
    Every pass over the text has an order of its own.

    :param blocks: int64 [N, S].
    :param vocabulary: how many tokens there are, special ones included.
    """

    def __init__(self, blocks: Tensor, *, batch: int, vocabulary: int, fraction: float, seed: int) -> None:
        self.blocks = blocks
        self.batch = batch
        self.vocabulary = vocabulary
        self.chosen_per_block = max(1, round(fraction * (blocks.shape[1] - 2)))
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def at(self, step: int) -> MaskedBatch:
        """The batch of ``step``, counted from 1."""
        first = (step - 1) * self.batch
        original = self.blocks[torch.from_numpy(self._block_numbers(first, first + self.batch))]
        random = np.random.default_rng([self.seed, _MASKING, step])
        size, length = original.shape
        # The positions with the smallest of independent random keys are a draw without replacement.
        keys = random.random((size, length - 2))
        chosen = 1 + np.argpartition(keys, self.chosen_per_block - 1, axis=1)[:, : self.chosen_per_block]
        treatment = random.random(chosen.shape)
        substitutes = random.integers(len(SPECIAL_TOKENS), self.vocabulary, chosen.shape)
        positions = torch.from_numpy(chosen)
        kept = original.gather(1, positions)
        replaced = torch.where(torch.from_numpy(treatment < 0.9), torch.from_numpy(substitutes), kept)
        replaced = torch.where(torch.from_numpy(treatment < 0.8), torch.tensor(_MASK), replaced)
        labels = torch.full_like(original, IGNORED).scatter(1, positions, kept)
        return MaskedBatch(original.scatter(1, positions, replaced), labels)

    def _block_numbers(self, first: int, end: int) -> np.ndarray:
        """Numbers of the blocks at places ``first`` to ``end`` of the endless sequence of shuffled passes."""
        count = len(self.blocks)
        places = np.arange(first, end)
        passes = places // count
        self._orders = {
            number: self._orders[number] if number in self._orders else self._order(number) for number in range(passes[0], passes[-1] + 1)
        }
        return np.array([self._orders[number][place % count] for number, place in zip(passes, places, strict=True)])

    def _order(self, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, _ORDER, number]).permutation(len(self.blocks))
