"""Targets: found by name, or taken as they are; others are refused."""

import re
from typing import Any

import pytest

from stepdown.models.errors import OptionError
from stepdown.models.operators import ROW_OPERATORS, Contraction, Operator, RowGroup, TiledGroup
from stepdown.pipeline.target import TARGETS, Target, find_target
from stepdown.transformations.lowering import cpu


def test_targets_are_found_by_their_name() -> None:
    assert {find_target(name).name for name in TARGETS} == set(TARGETS)
    assert find_target("cpu").implementation == "cpu"


def test_a_target_is_taken_as_it_is() -> None:
    target = Target("mine", "pure")
    assert find_target(target) is target


@pytest.mark.parametrize("name", ["tpu", "", "CPU", " cpu", None, 3, ["cpu"], {"cpu": 1}])
def test_another_target_is_refused_in_one_sentence(name: Any) -> None:
    accepted = ", ".join(f'"{known}"' for known in TARGETS)
    message = re.escape(f'target "{name}" is unknown; accepted are {accepted}.')
    with pytest.raises(OptionError, match=f"^{message}$"):
        find_target(name)


def test_every_operator_has_the_implementation_of_the_target() -> None:
    """Registering twice is registering once."""
    expanded: list[type[Operator]] = [*ROW_OPERATORS, RowGroup, TiledGroup, Contraction]
    cpu.register()
    before = [dict(operator.implementations) for operator in expanded]
    cpu.register()
    assert before == [dict(operator.implementations) for operator in expanded]
    for operator in expanded:
        assert find_target("cpu").implementation in operator.implementations, operator.__name__
