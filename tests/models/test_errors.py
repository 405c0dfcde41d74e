"""The exception hierarchy: one base, and the built-in class that a caller would catch without knowing Stepdown."""

import pytest

from stepdown.models import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("DefinitionError", ValueError),
        ("InputError", ValueError),
        ("OptionError", ValueError),
        ("CanonicalFormError", Exception),
        ("BuildError", RuntimeError),
        ("CacheError", OSError),
    ],
)
def test_every_error_has_the_base_and_its_builtin_class(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.StepdownError)
    assert issubclass(error, builtin)


def test_nothing_else_is_defined() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == {
        "StepdownError",
        "DefinitionError",
        "InputError",
        "OptionError",
        "CanonicalFormError",
        "BuildError",
        "CacheError",
    }


def test_a_cache_error_keeps_errno_and_sentence() -> None:
    error = errors.CacheError(13, "The cache cannot be written.")
    assert error.errno == 13
    assert str(error) == error.strerror == "The cache cannot be written."
    assert str(errors.CacheError("The cache is gone.")) == "The cache is gone."
