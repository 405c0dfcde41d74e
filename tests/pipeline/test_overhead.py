"""Rows of what a call costs besides its kernels; what is measured is tested with the runtime."""

from stepdown.models.definition import EncoderLayer
from stepdown.pipeline.overhead import BARE, OURS, rows_of


def test_rows() -> None:
    samples = {("forward", OURS): [3.0, 1.0, 2.0], ("forward", BARE): [5.0]}
    ours, bare = rows_of(samples, EncoderLayer(embed=8, heads=2, ffn=12), 2, 3, "measure")
    assert (ours.case, ours.implementation, ours.unit, ours.command) == ("forward", OURS, "us", "measure")
    assert (ours.median, ours.spread, ours.repeats, ours.values) == (2.0, 1.0, 3, {"best": 1.0})
    assert ours.shape == {"B": 2, "S": 3, "E": 8, "H": 2, "U": 12}
    assert (bare.median, bare.spread, bare.values) == (5.0, 0.0, {"best": 5.0})
    assert len({row.identity for row in (ours, bare)}) == 2
