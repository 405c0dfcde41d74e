"""The account of a training step: its tables agree with each other and with the counts, and land in files."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.account import (
    EVERY_PASS,
    SDPA_WITHOUT_DROPOUT,
    UNFUSED,
    Account,
    account_for,
    argument_bytes,
    run_passes,
    write_account,
)
from stepdown.pipeline.compare import kept_bytes_of
from stepdown.pipeline.stages import OPTIONAL_PASSES, STAGES

LAYER = EncoderLayer(embed=64, heads=4, ffn=128)
BATCH, SEQ = 4, 64


@pytest.fixture(scope="module")
def account(strict_dace_session: None) -> Account:
    """The account of a small layer."""
    return account_for("small", LAYER, batch=BATCH, seq=SEQ)


def test_every_pass_has_a_row_in_both_variants(account: Account) -> None:
    rows = account.tables["words_by_pass"]
    names = [name for stage in STAGES if stage.canonical for name, _ in stage.passes if stage.name != "parse"]
    for variant, missing in ((EVERY_PASS, set()), (UNFUSED, {"fuse-attention"})):
        own = [row for row in rows if row["variant"] == variant]
        assert [row["after pass"] for row in own] == [name for name in names if name not in missing]
        assert own[0]["% less than differentiate"] == 0
        for row in own:
            assert row["Mwords"] == pytest.approx(row["Mwords forward"] + row["Mwords backward"], abs=0.11)
    assert {row["layer"] for row in rows} == {"small"}


def test_words_are_those_of_the_graph(account: Account) -> None:
    passes, graph = run_passes(LAYER, BATCH, SEQ, resolve_dtype("float32"))
    last = passes[-1].counts.total.at(BATCH, SEQ)
    row = [row for row in account.tables["words_by_pass"] if row["variant"] == EVERY_PASS][-1]
    assert row["Mwords"] == round((last["words_in"] + last["words_out"]) / 1e6, 1)
    assert row["kernels"] == last["kernels"]
    assert graph.backward is not None


def test_passes_can_be_switched_off() -> None:
    passes, _ = run_passes(LAYER, BATCH, SEQ, resolve_dtype("float32"), disable=OPTIONAL_PASSES)
    assert [one.name for one in passes] == ["parse", "differentiate"]


def test_totals_and_differences_agree(account: Account) -> None:
    for total in account.tables["step_totals"]:
        differences = [row for row in account.tables["step_differences"] if row["count"] == total["count"]]
        assert sum(row["difference"] for row in differences) == pytest.approx(total["difference"], abs=0.3)
        assert differences[-1]["kernels by hand"] == "all others"


def test_differences_are_explained_at_the_papers_sizes(strict_dace_session: None) -> None:
    large = EncoderLayer(embed=1024, heads=16, ffn=4096)
    found = account_for("large", large, batch=8, seq=512, torch_keeps=False)
    totals = {row["count"]: row["Mwords by hand"] for row in found.tables["step_totals"]}
    assert totals == {"operator by operator": 1266.7, "the paper's groups": 914.4, "fused attention": 453.0}
    unexplained = [row for row in found.tables["step_differences"] if not row["why"]]
    assert not unexplained
    forward = found.tables["paper_forward"]
    assert [row["kernel"] for row in forward if row["difference"] and not row["why"]] == ["all"]
    total = forward[-1]
    assert float(total["Mwords in"]) + float(total["Mwords out"]) == pytest.approx(524.3, abs=0.05)
    assert total["difference"] == 50.4
    assert sum(row["difference"] for row in forward[:-1]) == pytest.approx(50.4, abs=0.15)
    contractions = {row["kernel"]: row["our Gflop"] for row in forward}
    names = ("Q, K and V", "QK^T", "gamma", "attention output", "FFN 1", "FFN 2")
    assert [contractions[name] for name in names] == ["25.770", "4.295", "4.295", "8.590", "34.360", "34.360"]
    last = {row["variant"]: row for row in found.tables["words_by_pass"]}
    assert last[UNFUSED]["% less than by hand"] >= 30
    assert last[EVERY_PASS]["% less than differentiate"] >= 63


def test_other_layers_have_no_hand_count() -> None:
    relu = EncoderLayer(embed=16, heads=2, ffn=16, activation="relu")
    found = account_for("relu", relu, batch=1, seq=8, torch_keeps=False)
    assert found.tables["step_totals"] == found.tables["step_differences"] == []
    assert "kept_bytes" not in found.tables


def test_classes_are_beside_the_papers(account: Account) -> None:
    rows = account.tables["classes"]
    assert [row["paper % of flop"] for row in rows[:3]] == [99.8, 0.17, 0.03]
    for label in ("differentiate", EVERY_PASS):
        own = [row for row in rows if row["after"] == label]
        assert sum(row["% of flop"] for row in own) == pytest.approx(100, abs=0.1)
        assert sum(row["% of bytes moved"] for row in own) == pytest.approx(100, abs=0.2)


def test_what_pytorch_keeps_is_measured(account: Account) -> None:
    kept = {row["implementation"]: row for row in account.tables["kept_bytes"]}
    module = ReferenceEncoderLayer(LAYER).train()
    measured = kept_bytes_of(module, torch.randn(BATCH, SEQ, LAYER.embed))
    assert kept["PyTorch, eager"]["MB kept"] == round(measured / 1e6, 1)
    assert kept[SDPA_WITHOUT_DROPOUT]["% of SDPA without attention dropout"] == 100
    assert kept["PyTorch, eager"]["MB kept"] > kept[SDPA_WITHOUT_DROPOUT]["MB kept"]
    (budget,) = [name for name in kept if "memory budget" in name]
    assert kept[f"stepdown, {EVERY_PASS}"]["MB kept"] <= kept[SDPA_WITHOUT_DROPOUT]["MB kept"]
    assert kept[budget]["% of SDPA without attention dropout"] <= 70


def test_a_budget_out_of_reach_is_said() -> None:
    long = account_for("long", EncoderLayer(embed=16, heads=1, ffn=16), batch=1, seq=4)
    last = long.tables["kept_bytes"][-1]
    assert "memory budget" in last["implementation"]
    assert ("cannot be met" in last["implementation"]) == ("MB kept" not in last)


def test_arguments_of_backward_are_counted() -> None:
    _, graph = run_passes(LAYER, BATCH, SEQ, resolve_dtype("float32"))
    x, mask, pair = 4 * BATCH * SEQ * 64, BATCH * SEQ, 2 * 8
    assert argument_bytes(graph) == x + mask + pair


def test_files_hold_the_tables(account: Account, tmp_path: Path) -> None:
    files = write_account(account, tmp_path / "results")
    assert {file.name for file in files} == {path.name for path in (tmp_path / "results").iterdir()}
    with (tmp_path / "results" / "words_by_pass.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(account.tables["words_by_pass"])
    assert rows[0]["shape"] == f"B={BATCH} S={SEQ}"
    assert all(rows[0][name] for name in ("rule", "versions", "date", "command"))
    for file in files:
        if file.suffix == ".svg":
            ElementTree.fromstring(file.read_text())
    assert write_account(account, tmp_path / "results") == files


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(OptionError, match='"batch" is 0'):
        account_for("x", LAYER, batch=0, seq=1)
