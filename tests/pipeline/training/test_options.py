"""Training options: what is refused, the learning rate, what a resumed run must share."""

from collections.abc import Callable
from typing import Any

import pytest

from stepdown.models.errors import OptionError, StepdownError
from stepdown.pipeline.training import TrainingOptions

Options = Callable[..., TrainingOptions]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"model": "bert-huge"}, "bert-huge"),
        ({"backend": "jax"}, "jax"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "int8"}, "int8"),
        ({"seq": 513}, "512"),
        ({"seq": 3}, "seq"),
        ({"steps": 0}, "steps"),
        ({"batch": 1.5}, "batch"),
        ({"batch": True}, "batch"),
        ({"keep": 0}, "keep"),
        ({"checkpoint_every": -1}, "checkpoint_every"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"warmup": 6}, "warmup"),
        ({"vocabulary": 5}, "vocabulary"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"clip": float("inf")}, "clip"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"mask_fraction": 1.0}, "mask_fraction"),
        ({"dropout": 1.0}, "dropout"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_is_refused_in_one_sentence(
    small_options: Options, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError) as refused:
        small_options(**wrong)
    assert named in str(refused.value)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
    assert isinstance(refused.value, StepdownError)


def test_names_are_normalised(small_options: Options) -> None:
    options = small_options(dtype="bf16", model="BERT_tiny")
    assert (options.dtype, options.model) == ("bfloat16", "bert-tiny")


def test_the_learning_rate_rises_linearly_then_falls_towards_zero(small_options: Options) -> None:
    options = small_options(steps=12, warmup=4, learning_rate=0.8)
    rates = [options.learning_rate_at(step) for step in range(1, 13)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_without_warmup_the_first_step_has_the_highest_rate(small_options: Options) -> None:
    options = small_options(steps=4, warmup=0, learning_rate=0.4)
    assert [options.learning_rate_at(step) for step in range(1, 5)] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_what_does_not_change_the_numbers_is_free_on_resume(small_options: Options) -> None:
    first, second = small_options(), small_options(resume=True, checkpoint_every=2, keep=1, out="elsewhere")
    assert first.fixed() == second.fixed()
    assert first.fixed() != small_options(batch=3).fixed()
