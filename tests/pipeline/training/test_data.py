"""Text, tokenizer, blocks and dynamic masking."""

from pathlib import Path

import pytest
import torch

from stepdown.pipeline.training.data import (
    IGNORED,
    SPECIAL_TOKENS,
    MaskedBatches,
    read_text,
    text_blocks,
    train_tokenizer,
)
from stepdown.pipeline.training.errors import TextError

CLS, SEP, MASK = 2, 3, 4


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"caf\xe9 au lait", "not UTF-8 at byte 3"),
        ("folder", "cannot be read"),
    ],
)
def test_a_bad_text_is_refused_in_one_sentence(tmp_path: Path, content: bytes | str | None, named: str) -> None:
    path = tmp_path / "text.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    with pytest.raises(TextError, match=named) as refused:
        read_text(path)
    assert str(path) in str(refused.value) and str(refused.value).endswith(".")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert read_text(path).content == "hello"


def test_a_text_without_one_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven", encoding="utf-8")
    text = read_text(path)
    with pytest.raises(TextError, match="blocks of 16"):
        text_blocks(train_tokenizer(text, 100), text, batch=2, seq=16)


def test_the_tokenizer_is_wordpiece_with_bert_special_tokens(small_text: Path) -> None:
    text = read_text(small_text)
    tokenizer = train_tokenizer(text, 160)
    assert tokenizer.get_vocab_size() <= 160
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(5))
    encoded = tokenizer.encode("Residual GRADIENTS kernels.")
    assert tokenizer.decode(encoded.ids) == "residual gradients kernels."
    assert any(token.startswith("##") for token in tokenizer.get_vocab())
    assert [tokenizer.id_to_token(token) for token in (encoded.ids[0], encoded.ids[-1])] == ["[CLS]", "[SEP]"]


def test_equal_texts_give_equal_tokenizers(small_text: Path) -> None:
    text = read_text(small_text)
    assert len({train_tokenizer(text, 160).to_str() for _ in range(5)}) == 1


def test_the_vocabulary_is_bounded_whatever_the_alphabet(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x0400 + number % 200) * 3 + " " for number in range(2000)), encoding="utf-8")
    assert train_tokenizer(read_text(path), 64).get_vocab_size() <= 64


def test_blocks_hold_the_whole_text_in_order(small_text: Path) -> None:
    text = read_text(small_text)
    tokenizer = train_tokenizer(text, 160)
    blocks = text_blocks(tokenizer, text, batch=2, seq=16)
    assert blocks.dtype == torch.int64 and blocks.shape[1] == 16
    assert (blocks[:, 0] == CLS).all() and (blocks[:, -1] == SEP).all()
    whole = tokenizer.encode(text.content, add_special_tokens=False).ids
    assert blocks[:, 1:-1].flatten().tolist() == whole[: 14 * len(blocks)]
    assert len(whole) - 14 * len(blocks) < 14


@pytest.fixture
def blocks() -> torch.Tensor:
    """100 blocks of 42 tokens, all different inside one block."""
    body = torch.stack([torch.randperm(500)[:40] + 5 for _ in range(100)])
    ends = torch.ones(100, 1, dtype=torch.int64)
    return torch.cat([CLS * ends, body, SEP * ends], 1)


def batches(blocks: torch.Tensor, *, batch: int = 20, seed: int = 3) -> MaskedBatches:
    return MaskedBatches(blocks, batch=batch, vocabulary=505, fraction=0.15, seed=seed)


def test_masking_chooses_15_percent_and_treats_them_80_10_10(blocks: torch.Tensor) -> None:
    source = batches(blocks)
    drawn = [source.at(step) for step in range(1, 201)]
    inputs, labels = torch.cat([b.input_ids for b in drawn]), torch.cat([b.labels for b in drawn])
    chosen = labels != IGNORED
    assert (chosen.sum(1) == 6).all()  # 0.15 * 40
    assert not chosen[:, 0].any() and not chosen[:, -1].any()
    total = chosen.sum().item()
    masked = (inputs[chosen] == MASK).float().mean().item()
    same = (inputs[chosen] == labels[chosen]).float().mean().item()
    five_sigma = 5 * (0.8 * 0.2 / total) ** 0.5
    assert masked == pytest.approx(0.8, abs=five_sigma)
    assert same == pytest.approx(0.1 + 0.1 / 500, abs=five_sigma)
    assert (inputs[chosen] >= MASK).all() and (inputs[chosen] < 505).all()
    counts = chosen[:, 1:-1].sum(0).float()
    assert (counts / counts.mean() - 1).abs().max() < 5 / counts.mean() ** 0.5


def test_what_is_not_chosen_is_the_text(blocks: torch.Tensor) -> None:
    source = batches(blocks, batch=100)
    batch = source.at(1)
    restored = torch.where(batch.labels == IGNORED, batch.input_ids, batch.labels)
    assert sorted(restored.tolist()) == sorted(blocks.tolist())


def test_a_pass_visits_every_block_once_and_the_next_in_another_order(blocks: torch.Tensor) -> None:
    source = batches(blocks, batch=30)  # passes end inside batches 4 and 7

    def first_tokens(step: int) -> list[list[int]]:
        batch = source.at(step)
        return torch.where(batch.labels == IGNORED, batch.input_ids, batch.labels).tolist()

    sequence = [block for step in range(1, 8) for block in first_tokens(step)]
    first, second = sequence[:100], sequence[100:200]
    assert sorted(first) == sorted(second) == sorted(blocks.tolist())
    assert first != second


def test_a_step_depends_on_seed_and_number_alone(blocks: torch.Tensor) -> None:
    walked = batches(blocks)
    for step in range(1, 12):
        walked.at(step)
    torch.rand(3)
    jumped = batches(blocks)
    assert torch.equal(walked.at(12).input_ids, jumped.at(12).input_ids)
    assert torch.equal(walked.at(12).labels, jumped.at(12).labels)
    assert not torch.equal(walked.at(12).input_ids, batches(blocks, seed=4).at(12).input_ids)
    # The same blocks in the next pass are masked anew.
    assert not torch.equal(walked.at(12).labels, walked.at(17).labels)


def test_a_short_block_still_asks_for_one_token() -> None:
    short = torch.tensor([[CLS, 7, 8, SEP]])
    batch = MaskedBatches(short, batch=1, vocabulary=20, fraction=0.15, seed=0).at(1)
    assert (batch.labels != IGNORED).sum() == 1
