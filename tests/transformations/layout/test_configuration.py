"""The configuration of layouts: how it is spelled, what it is read from, and what is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepdown.models.errors import OptionError
from stepdown.transformations.layout.configuration import LayoutConfiguration, read_layouts
from stepdown.transformations.layout.layouts import Layout


def test_a_mapping_and_a_file_say_the_same(tmp_path: Path) -> None:
    content = {
        "about": "measured by hand",
        "containers": {"scores": "BHTS", "intermediate": {"order": "USB", "pad": 16}},
        "backward": {"gradient_scores": {"order": "HBST", "pad": {"S": 4, "B": 64}}},
    }
    file = tmp_path / "layouts.json"
    file.write_text(json.dumps(content))
    expected = LayoutConfiguration(
        {"scores": Layout("BHTS"), "intermediate": Layout("USB", (("S", 16),))},
        {},
        {"gradient_scores": Layout("HBST", (("B", 64), ("S", 4)))},
    )
    assert read_layouts(content) == read_layouts(file) == read_layouts(str(file)) == expected


def test_equal_configurations_have_one_spelling() -> None:
    short = read_layouts({"containers": {"b": {"order": "USB", "pad": 16}, "a": {"order": "BS", "pad": 1}}})
    long = read_layouts({"containers": {"a": "BS", "b": {"order": "USB", "pad": {"S": 16, "U": 1}}}, "forward": {}})
    assert short.to_dict() == long.to_dict() == {"containers": {"a": "BS", "b": {"order": "USB", "pad": {"S": 16}}}}
    assert list(short.to_dict()["containers"]) == ["a", "b"]
    assert read_layouts(short.to_dict()) == short


def test_nothing_is_the_default() -> None:
    sources: tuple[dict[str, Any] | None, ...] = (None, {}, {"containers": {}})
    for source in sources:
        configuration = read_layouts(source)
        assert not configuration
        assert configuration.to_dict() == {}


def test_one_graph_goes_before_both() -> None:
    configuration = read_layouts({"containers": {"a": "BS", "b": "BS"}, "backward": {"a": "SB"}})
    assert {name: layout.order for name, layout in configuration.of("forward").items()} == {"a": "BS", "b": "BS"}
    assert {name: layout.order for name, layout in configuration.of("backward").items()} == {"a": "SB", "b": "BS"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "layouts 3 were given; accepted are a mapping and the path of a JSON file."),
        ({"container": {}}, 'an entry "container"; accepted are "containers", "forward", "backward", "about".'),
        ({"containers": ["a"]}, "\"containers\" of the layouts is ['a']; accepted is an object of container names."),
        ({"containers": {"a": 3}}, 'layout of container "a": 3 was given; accepted are an order like "BHTS"'),
        ({"containers": {"a": {"pad": 4}}}, "layout of container \"a\": {'pad': 4} was given"),
        ({"containers": {"a": {"order": "BS", "by": 4}}}, "accepted are an order"),
        ({"containers": {"a": ""}}, 'order "" was given; accepted are the letters of a container\'s dimensions'),
        ({"containers": {"a": "BB"}}, 'order "BB" was given; accepted are the letters'),
        ({"containers": {"a": "bs"}}, 'order "bs" was given'),
        ({"containers": {"a": {"order": "B", "pad": 4}}}, 'padding 4 of order "B" was given; one dimension alone'),
        ({"containers": {"a": {"order": "BS", "pad": "4"}}}, "padding '4' was given; accepted are a whole number"),
        ({"containers": {"a": {"order": "BS", "pad": True}}}, "padding True was given"),
        ({"containers": {"a": {"order": "BS", "pad": 0}}}, 'padding 0 of order "BS" was given; accepted are whole'),
        ({"containers": {"a": {"order": "BS", "pad": {"B": 1.5}}}}, 'padding 1.5 of order "BS" was given'),
        ({"containers": {"a": {"order": "BS", "pad": {"S": 4}}}}, 'but for the fastest: "B".'),
        ({"containers": {"a": {"order": "BS", "pad": {"E": 4}}}}, 'padding of dimension "E" in order "BS" was given'),
        ({"containers": {"a": {"order": "E", "pad": {"E": 4}}}}, "none, because there is one dimension only"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_sentence(source: Any, message: str) -> None:
    with pytest.raises(OptionError) as refusal:
        read_layouts(source)
    assert message in str(refusal.value)
    assert str(refusal.value).endswith(".")
    assert str(refusal.value).count(". ") == 0


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r'layouts file ".*absent.json" cannot be read: No such file'):
        read_layouts(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(OptionError, match="is not JSON"):
        read_layouts(broken)
    broken.write_text("[1]")
    with pytest.raises(OptionError, match=r"layouts in .* are \[1\]; accepted is an object"):
        read_layouts(broken)
    broken.write_text('{"containers": {"a": "BB"}}')
    with pytest.raises(OptionError, match=r'layout of container "a" in ".*broken.json": order "BB"'):
        read_layouts(broken)
