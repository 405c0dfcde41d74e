"""Text to masked batches: WordPiece, blocks, dynamic masking.

Everything a step sees is a function of text, seed and step number, so that a resumed run needs no state of its own.

Dimension legend: `B` batch, `S` position, `N` blocks of the text.
"""

import hashlib
from collections import Counter
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
from tokenizers.processors import BertProcessing
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor

from stepdown.pipeline.training.errors import TextError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Token 0 to 4."""

IGNORED = -100
"""The label of a position that is not to be predicted: PyTorch's `ignore_index`."""

_, _UNKNOWN, _CLS, _SEP, _MASK = range(len(SPECIAL_TOKENS))
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

    Normalisation and splitting are BERT's (Devlin et al. 2018): words and punctuation apart, accents dropped. Equal
    texts give equal tokenizers.
    """
    normalizer, splitter = BertNormalizer(lowercase=True), BertPreTokenizer()
    words = Counter(
        word
        for line in text.content.splitlines()
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line))
    )
    letters = _most_frequent_letters(words, vocabulary // 4)
    continuations = sorted({f"##{letter}" for word in words for letter in word[1:] if letter in letters})
    # The trainer numbers continuation letters in the order of a randomly seeded hash map, and breaks ties between
    # pieces by these numbers. Named beforehand they have fixed numbers.
    trainer = WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        limit_alphabet=len(letters),
        initial_alphabet=sorted(letters),
        special_tokens=[*SPECIAL_TOKENS, *continuations],
        show_progress=False,
    )
    learner = Tokenizer(WordPiece(unk_token=SPECIAL_TOKENS[_UNKNOWN]))
    learner.normalizer, learner.pre_tokenizer = normalizer, splitter
    learner.train_from_iterator(text.content.splitlines(), trainer)

    tokenizer = Tokenizer(WordPiece(learner.get_vocab(), unk_token=SPECIAL_TOKENS[_UNKNOWN]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = WordPieceDecoder()
    tokenizer.post_processor = BertProcessing((SPECIAL_TOKENS[_SEP], _SEP), (SPECIAL_TOKENS[_CLS], _CLS))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _most_frequent_letters(words: Counter[str], limit: int) -> frozenset[str]:
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            counts[letter] += count
    return frozenset(sorted(counts, key=lambda letter: (-counts[letter], letter))[:limit])


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
        return np.array([self._order(place // count)[place % count] for place in range(first, end)])

    def _order(self, number: int) -> np.ndarray:
        """The order of pass ``number``; the latest two are remembered, because a batch may span a pass's end."""
        if number not in self._orders:
            self._orders = {kept: order for kept, order in self._orders.items() if kept == number - 1}
            self._orders[number] = np.random.default_rng([self.seed, _ORDER, number]).permutation(len(self.blocks))
        return self._orders[number]
