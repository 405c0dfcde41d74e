"""The project's exceptions. A message is one sentence: what was given, what is accepted, names in quotes."""


class StepdownError(Exception):
    """Base of every error that Stepdown raises on purpose."""


class DefinitionError(StepdownError, ValueError):
    """A layer definition that cannot exist, such as an embedding size that the heads do not divide."""


class InputError(StepdownError, ValueError):
    """A compiled layer was called with something it was not built for: rank, size, dtype, device or mask."""


class OptionError(StepdownError, ValueError):
    """An option that does not exist: preset, dtype, target, pass or stage."""


class CanonicalFormError(StepdownError):
    """An SDFG breaks a rule of the canonical form (``docs/canonical_form.md``)."""


class BuildError(StepdownError, RuntimeError):
    """The compiler is missing, or it refused the generated code."""


class CacheError(StepdownError, OSError):
    """The build cache cannot be used, such as a folder that cannot be written; made from ``errno`` and a sentence."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()
