"""Charts: lengths, shares and places are those of the numbers, and the text is well-formed XML."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from stepdown.pipeline.analysis.build_stages import analyze_stage
from stepdown.pipeline.analysis.charts import CLASS_COLOURS, PART_COLOURS, Bar, bar_chart, class_chart, roofline
from stepdown.pipeline.analysis.machine import MACHINES, Machine, MeasuredTimes
from stepdown.pipeline.analysis.operators import Analysis
from stepdown.pipeline.build_folder import BuildFolder

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = Machine("a machine", bandwidth=1e9, flop_rate=1e10)


@pytest.fixture(scope="module")
def analysis(stages_build: BuildFolder) -> Analysis:
    """The small layer's operators before lowering."""
    return analyze_stage(stages_build, None, {"B": 2, "S": 16})[1]


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}{kind}"))


def test_bars_have_the_lengths_of_their_numbers() -> None:
    svg = bar_chart("a & b", [Bar("one", (30.0, 10.0)), Bar("two", (5.0, 15.0))], ("first", "second"), "B", note="<n>")
    bars = [rect for rect in shapes(svg, "rect") if rect.get("height") == "16.0"]
    widths = [float(rect.get("width", "0")) for rect in bars]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 1 / 3, 1 / 6, 1 / 2], rel=0.01)
    assert [rect.get("fill") for rect in bars] == [*PART_COLOURS[:2]] * 2
    texts = [text.text for text in shapes(svg, "text")]
    assert {"a & b", "one", "two", "40 B, 100 %", "20 B, 50 %", "<n>"} <= set(texts)
    assert "40 B" in {
        t.text for t in shapes(bar_chart("t", [Bar("one", (40.0,))], ("x",), "B", baseline=False), "text")
    }


def test_percentages_are_of_the_first_bar() -> None:
    texts = {
        text.text for text in shapes(bar_chart("t", [Bar("one", (10.0,)), Bar("two", (20.0,))], ("x",), "B"), "text")
    }
    assert {"10 B, 100 %", "20 B, 200 %"} <= texts


def test_classes_are_shares(analysis: Analysis) -> None:
    bars = [rect for rect in shapes(class_chart("classes", analysis, MACHINE), "rect") if rect.get("height") == "22.0"]
    assert len(bars) == 3 * 3
    for row in (bars[:3], bars[3:6], bars[6:]):
        widths = [float(rect.get("width", "0")) for rect in row]
        assert [rect.get("fill") for rect in row] == list(CLASS_COLOURS.values())
        assert sum(widths) == pytest.approx(720 - 118 - 24, abs=0.5)
    moved = analysis.classes["both"]["contraction"].bytes_share
    assert moved is not None
    assert float(bars[3].get("width", "0")) == pytest.approx(moved / 100 * 578, abs=0.1)


def test_operators_stand_on_the_roof(analysis: Analysis) -> None:
    svg = roofline("roof", analysis, MACHINE)
    circles = shapes(svg, "circle")
    assert len(circles) == len([record for record in analysis.operators if record.intensity])
    (roof,) = shapes(svg, "polyline")
    (x1, y1), (x2, y2), (_, y3) = [tuple(map(float, point.split(","))) for point in roof.get("points", "").split()]
    assert y2 == y3
    for circle in circles:
        x, y = float(circle.get("cx", "0")), float(circle.get("cy", "0"))
        on_roof = y2 if x >= x2 else y1 + (y2 - y1) * (x - x1) / (x2 - x1)
        assert y == pytest.approx(on_roof, abs=0.2)
    assert "no times are known" in svg


def test_measured_operators_stand_below_the_roof(stages_build: BuildFolder, analysis: Analysis) -> None:
    slow = {
        direction: {
            record.name: 10 * MACHINE.least_seconds(float(record.flop), float(record.bytes_moved))
            for record in analysis.operators
            if record.direction == direction
        }
        for direction in ("forward", "backward")
    }
    _, timed = analyze_stage(stages_build, None, {"B": 2, "S": 16}, MeasuredTimes(MACHINE, slow))
    svg = roofline("roof", timed, MACHINE)
    assert "flop/s, measured" in svg
    (roof,) = shapes(svg, "polyline")
    top = float(roof.get("points", "").split()[-1].split(",")[1])
    assert all(float(circle.get("cy", "0")) > top + 10 for circle in shapes(svg, "circle"))
    assert "time, measured" in class_chart("classes", timed, MACHINE)


def test_an_operator_without_flop_is_not_on_the_roof(analysis: Analysis) -> None:
    first, *rest = analysis.operators
    without = replace(analysis, operators=(replace(first, flop=0, intensity=0.0), *rest))
    before, after = (len(shapes(roofline("r", one, MACHINES["v100"]), "circle")) for one in (analysis, without))
    assert after == before - 1
