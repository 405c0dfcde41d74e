"""The account of a layer's training step: words after every pass, kernels, bytes kept, and counts by hand beside it.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.

Every number is counted, not measured, but for what PyTorch keeps. Rule: ``docs/counting.md``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.encoder import INPUT, MASK, OUTPUT, RNG
from stepdown.models.errors import OptionError
from stepdown.models.operators import OperatorClass
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.analysis.charts import Bar, bar_chart, class_chart, roofline
from stepdown.pipeline.analysis.counts import GraphCounts
from stepdown.pipeline.analysis.hand_counts import (
    HAND_COUNTS,
    PAPER_FORWARD,
    WHY,
    ComparedKernels,
    compare_with_hand,
    layer_sizes,
    total_words,
)
from stepdown.pipeline.analysis.machine import MACHINES, Machine
from stepdown.pipeline.analysis.operators import Analysis, analyze
from stepdown.pipeline.build_folder import DIRECTIONS
from stepdown.pipeline.compare import kept_bytes_of
from stepdown.pipeline.results import installed_versions, replace_file, this_command, today
from stepdown.pipeline.stages import OPTIONAL_PASSES, STAGES, Compilation, PassRecord, StageRecord, run_stages
from stepdown.pipeline.target import find_target
from stepdown.transformations.training_graph import TrainingGraph

RULE = "each kernel reads each distinct input once and writes each output once; masks are regenerated"
ATTENTION_PASS = "fuse-attention"
EVERY_PASS = "every pass"
UNFUSED = "attention unfused"
PAPER_SHARES = {
    OperatorClass.CONTRACTION: (99.8, 61.0),
    OperatorClass.STATISTICAL_NORMALIZATION: (0.17, 25.5),
    OperatorClass.ELEMENT_WISE: (0.03, 13.5),
}
"""Percent of flop and of run time in the paper's Table 1 (PyTorch on a V100)."""

LEAST_KEPT = 0.7
"""What a memory budget in the account leaves of what PyTorch keeps with SDPA."""

SDPA_WITHOUT_DROPOUT = "PyTorch, SDPA without attention dropout"
"""On the CPU, PyTorch's fused attention draws no dropout: with it, SDPA keeps the weights as eager attention does."""

Rows = list[dict[str, Any]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class CountedPass:
    """A pass of one variant and the counts of the graph after it."""

    stage: str
    name: str
    counts: GraphCounts


@dataclass
class Account:
    """The tables and charts of one layer, by file name without its ending.

    :ivar tables: rows of each table.
    :ivar charts: SVG text of each chart.
    """

    name: str
    batch: int
    seq: int
    dtype: str
    tables: dict[str, Rows] = field(default_factory=dict)
    charts: dict[str, str] = field(default_factory=dict)


def account_for(
    name: str,
    layer: EncoderLayer,
    *,
    batch: int,
    seq: int,
    dtype: str = "float32",
    machine: Machine = MACHINES["v100"],
    torch_keeps: bool = True,
    progress: Progress = lambda step: None,
) -> Account:
    """Count a training step of ``layer`` after every pass, with attention fused and not.

    :param machine: whose peaks the charts of time and the roofline use.
    :param torch_keeps: run PyTorch's layers once to see what autograd keeps.
    :param progress: called with a word before each step.
    :raises OptionError: when a size or type is not accepted.
    """
    for what, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise OptionError(f'"{what}" is {value}; accepted is a positive integer.')
    kind = resolve_dtype(dtype)
    account = Account(name, batch, seq, kind.name)
    variants: dict[str, tuple[list[CountedPass], TrainingGraph]] = {}
    for variant, disable in ((UNFUSED, (ATTENTION_PASS,)), (EVERY_PASS, ())):
        progress(variant)
        variants[variant] = run_passes(layer, batch, seq, kind, disable=disable)
    sizes = layer_sizes(layer, batch, seq)
    account.tables["words_by_pass"] = _words_by_pass(variants, sizes)
    totals, differences = _beside_hand_counts(variants, layer, sizes)
    account.tables["step_totals"] = totals
    account.tables["step_differences"] = differences
    if totals:
        progress("the paper's layer")
        account.tables["paper_forward"] = _paper_forward(layer, sizes, kind)
    passes, graph = variants[EVERY_PASS]
    before = next(one for one in variants[UNFUSED][0] if one.counts.backward is not None)
    account.tables["classes"] = _classes({before.name: before.counts, "every pass": passes[-1].counts}, batch, seq)
    analysis = analyze(graph, {"B": batch, "S": seq})
    if torch_keeps:
        progress("what PyTorch keeps")
        account.tables["kept_bytes"] = _kept(layer, batch, seq, kind, passes, graph)
    for label, rows in account.tables.items():
        account.tables[label] = [{"layer": name, **row} for row in rows]
    account.charts = _charts(account, variants, analysis, machine)
    return account


def run_passes(
    layer: EncoderLayer,
    batch: int | None,
    seq: int | None,
    dtype: DataType,
    *,
    disable: Sequence[str] = (),
    memory_budget: int | None = None,
) -> tuple[list[CountedPass], TrainingGraph]:
    """Run the stages that leave canonical graphs; returns the passes that ran, counted, and the last graph."""
    compilation = Compilation(
        layer,
        batch,
        seq,
        dtype,
        find_target("cpu"),
        "counted",
        tuple(name for name in disable if name in OPTIONAL_PASSES),
        memory_budget=memory_budget,
    )
    found: list[CountedPass] = []

    def finished(record: StageRecord) -> None:
        found.extend(_counted(record.name, one) for one in record.passes if one.name not in compilation.disable)

    run_stages(compilation, finished=finished, stages=tuple(stage for stage in STAGES if stage.canonical))
    assert compilation.graph is not None
    return found, compilation.graph


def _counted(stage: str, record: PassRecord) -> CountedPass:
    assert record.counts is not None
    return CountedPass(stage, record.name, record.counts)


def _words(counts: GraphCounts, direction: str, batch: int, seq: int) -> int:
    part = {"both": counts.total, "forward": counts.forward, "backward": counts.backward}[direction]
    if part is None:
        return 0
    at = part.at(batch, seq)
    return at["words_in"] + at["words_out"]


def _million(words: float) -> float:
    return round(words / 1e6, 1)


def _words_by_pass(variants: Mapping[str, tuple[list[CountedPass], TrainingGraph]], sizes: Mapping[str, int]) -> Rows:
    batch, seq = sizes["B"], sizes["S"]
    by_hand = total_words(HAND_COUNTS["operator by operator"], sizes)
    rows = []
    for variant, (passes, _) in variants.items():
        first: int | None = None
        for one in passes:
            if one.counts.backward is None:
                continue
            words = _words(one.counts, "both", batch, seq)
            first = words if first is None else first
            total = one.counts.total.at(batch, seq)
            rows.append(
                {
                    "variant": variant,
                    "stage": one.stage,
                    "after pass": one.name,
                    "kernels": total["kernels"],
                    "Mwords forward": _million(_words(one.counts, "forward", batch, seq)),
                    "Mwords backward": _million(_words(one.counts, "backward", batch, seq)),
                    "Mwords": _million(words),
                    "% less than differentiate": round(100 - 100 * words / first, 1),
                    "% less than by hand": round(100 - 100 * words / by_hand, 1),
                    "MB moved": _million(total["bytes_moved"]),
                    "MB kept": _million(total["kept_bytes"]),
                    "Gflop": round(total["flop"] / 1e9, 1),
                }
            )
    return rows


def _beside_hand_counts(
    variants: Mapping[str, tuple[list[CountedPass], TrainingGraph]], layer: EncoderLayer, sizes: Mapping[str, int]
) -> tuple[Rows, Rows]:
    """Totals by hand beside ours, and every difference; both empty for a layer that the hand counts are not for."""
    if layer.norm != "post" or layer.activation == "relu" or layer.activation_dropout or layer.causal or not layer.bias:
        return [], []
    first = next(one for one in variants[EVERY_PASS][0] if one.counts.backward is not None)
    ours = {
        "operator by operator": ("differentiate", first.counts),
        "the paper's groups": (UNFUSED, variants[UNFUSED][0][-1].counts),
        "fused attention": (EVERY_PASS, variants[EVERY_PASS][0][-1].counts),
    }
    whole = total_words(HAND_COUNTS["operator by operator"], sizes)
    totals, differences = [], []
    for count, kernels in HAND_COUNTS.items():
        label, counts = ours[count]
        by_hand, words = total_words(kernels, sizes), _words(counts, "both", sizes["B"], sizes["S"])
        totals.append(
            {
                "count": count,
                "kernels by hand": len(kernels),
                "Mwords by hand": _million(by_hand),
                "% less": round(100 - 100 * by_hand / whole, 1),
                "ours": label,
                "our kernels": counts.total.kernels,
                "our Mwords": _million(words),
                "our % less": round(100 - 100 * words / whole, 1),
                "difference": _million(words - by_hand),
            }
        )
        compared = compare_with_hand(kernels, counts, sizes)
        differences += [_difference(count, one) for one in compared if _million(one.our_words - one.words_by_hand)]
        small = sum(
            one.our_words - one.words_by_hand for one in compared if not _million(one.our_words - one.words_by_hand)
        )
        differences.append(
            {
                "count": count,
                "direction": "both",
                "kernels by hand": "all others",
                "our kernels": "",
                "Mwords by hand": "",
                "our Mwords": "",
                "difference": round(small / 1e6, 2),
                "why": "vectors: biases, statistics, the mask, the generator's pair",
            }
        )
    return totals, differences


def _difference(count: str, one: ComparedKernels) -> dict[str, Any]:
    reasons = dict.fromkeys(WHY[count, name] for name in one.by_hand if (count, name) in WHY)
    return {
        "count": count,
        "direction": one.direction,
        "kernels by hand": " + ".join(one.by_hand),
        "our kernels": " + ".join(one.ours),
        "Mwords by hand": _million(one.words_by_hand),
        "our Mwords": _million(one.our_words),
        "difference": _million(one.our_words - one.words_by_hand),
        "why": "; ".join(reasons),
    }


def _paper_forward(layer: EncoderLayer, sizes: Mapping[str, int], dtype: DataType) -> Rows:
    """The forward pass of the paper's layer, kernel by kernel, beside the operators that ``differentiate`` leaves."""
    paper = replace(layer, activation="relu", activation_dropout=0.1)
    passes, _ = run_passes(paper, sizes["B"], sizes["S"], dtype, disable=OPTIONAL_PASSES)
    counts = passes[-1].counts
    forward = replace(counts, by_operator=tuple(one for one in counts.by_operator if one.direction == "forward"))
    kernels = {kernel.name: kernel for kernel in PAPER_FORWARD}
    flop = {one.name: one.counts.at(sizes["B"], sizes["S"])["flop"] for one in forward.by_operator}
    rows = []
    for one in compare_with_hand(PAPER_FORWARD, forward, sizes):
        (name,) = one.by_hand
        rows.append(
            {
                "kernel": name,
                "Mwords in": f"{kernels[name].words_in(sizes) / 1e6:.2f}",
                "Mwords out": f"{kernels[name].words_out(sizes) / 1e6:.2f}",
                "our operators": " + ".join(one.ours),
                "our Gflop": f"{sum(flop[operator] for operator in one.ours) / 1e9:.3f}",
                "our Mwords": f"{one.our_words / 1e6:.2f}",
                "difference": _million(one.our_words - one.words_by_hand),
                "why": WHY.get(("the paper's forward pass", name), ""),
            }
        )
    moved = _words(counts, "forward", sizes["B"], sizes["S"])
    total = {
        "kernel": "all",
        "Mwords in": f"{sum(kernel.words_in(sizes) for kernel in PAPER_FORWARD) / 1e6:.2f}",
        "Mwords out": f"{sum(kernel.words_out(sizes) for kernel in PAPER_FORWARD) / 1e6:.2f}",
        "our operators": str(len(forward.by_operator)),
        "our Gflop": f"{sum(flop.values()) / 1e9:.3f}",
        "our Mwords": f"{moved / 1e6:.2f}",
        "difference": _million(moved - total_words(PAPER_FORWARD, sizes)),
        "why": "",
    }
    return [*rows, total]


def _classes(counted: Mapping[str, GraphCounts], batch: int, seq: int) -> Rows:
    rows = []
    for label, counts in counted.items():
        by_class = {kind: own.at(batch, seq) for kind, own in counts.by_class().items()}
        whole = {name: sum(own[name] for own in by_class.values()) for name in ("flop", "bytes_moved")}
        for kind, own in by_class.items():
            flop, time = PAPER_SHARES[kind]
            rows.append(
                {
                    "after": label,
                    "class": kind.value,
                    "kernels": own["kernels"],
                    "% of flop": round(100 * own["flop"] / whole["flop"], 2),
                    "% of bytes moved": round(100 * own["bytes_moved"] / whole["bytes_moved"], 1),
                    "paper % of flop": flop,
                    "paper % of run time": time,
                }
            )
    return rows


def _kept(
    layer: EncoderLayer, batch: int, seq: int, dtype: DataType, passes: list[CountedPass], graph: TrainingGraph
) -> Rows:
    """What autograd holds from forward to backward, parameters excepted: PyTorch's measured, ours counted."""
    without = replace(layer, attention_dropout=0.0)
    measured = {
        "PyTorch, eager": _torch_keeps(layer, "eager", batch, seq, dtype),
        "PyTorch, SDPA": _torch_keeps(layer, "sdpa", batch, seq, dtype),
        SDPA_WITHOUT_DROPOUT: _torch_keeps(without, "sdpa", batch, seq, dtype),
    }
    least = measured[SDPA_WITHOUT_DROPOUT]
    arguments = argument_bytes(graph)
    budget = int(LEAST_KEPT * least) - arguments
    ours = {f"stepdown, {EVERY_PASS}": passes[-1].counts}
    label = f"stepdown, memory budget {budget / 1e6:.3g} MB"
    missed: Rows = []
    try:
        ours[label] = run_passes(layer, batch, seq, dtype, memory_budget=max(budget, 0))[0][-1].counts
    except OptionError:  # the smallest reachable budget is larger
        missed.append({"implementation": f"{label}: cannot be met"})
    kept = measured | {name: counts.total.at(batch, seq)["kept_bytes"] + arguments for name, counts in ours.items()}
    return [
        {
            "implementation": name,
            "MB kept": _million(one),
            "% of SDPA without attention dropout": round(100 * one / least, 1),
            "of it arguments and output": _million(arguments) if name in ours else "",
            "Mwords": _million(_words(ours[name], "both", batch, seq)) if name in ours else "",
        }
        for name, one in kept.items()
    ] + missed


def argument_bytes(graph: TrainingGraph) -> int:
    """Bytes of the layer's own input and output that backward reads: autograd holds those, too."""
    assert graph.backward is not None
    held = [graph.backward.arrays.get(name) for name in (INPUT, MASK, RNG, OUTPUT)]
    return sum(int(one.total_size) * one.dtype.bytes for one in held if one is not None and not one.transient)


def _torch_keeps(
    layer: EncoderLayer, attention: Literal["eager", "sdpa"], batch: int, seq: int, dtype: DataType
) -> int:
    module = ReferenceEncoderLayer(layer, attention=attention).to(dtype.torch).train()
    return kept_bytes_of(module, torch.randn(batch, seq, layer.embed, dtype=dtype.torch))


def _charts(
    account: Account,
    variants: Mapping[str, tuple[list[CountedPass], TrainingGraph]],
    analysis: Analysis,
    machine: Machine,
) -> dict[str, str]:
    where = f"{account.name}, B={account.batch} S={account.seq}"
    charts = {}
    for variant, (passes, _) in variants.items():
        bars = [
            Bar(one.name, tuple(float(_words(one.counts, d, account.batch, account.seq)) for d in DIRECTIONS))
            for one in passes
            if one.counts.backward is not None
        ]
        title = f"Words moved after every pass: {where}, {variant}"
        charts[f"words_by_pass_{'unfused' if variant == UNFUSED else 'fused'}"] = bar_chart(
            title, bars, DIRECTIONS, "words", note=f"{RULE[0].upper()}{RULE[1:]}."
        )
    charts["classes"] = class_chart(
        f"Classes: {where}, {EVERY_PASS}",
        analysis,
        machine,
        note=f"time, at least: every kernel at the peaks of {machine.name}",
    )
    charts["roofline"] = roofline(f"Roofline: {where}, {account.dtype}, {EVERY_PASS}", analysis, machine)
    if "kept_bytes" in account.tables:
        kept = [row for row in account.tables["kept_bytes"] if "MB kept" in row]
        bars = [Bar(row["implementation"], (1e6 * row["MB kept"],)) for row in kept]
        charts["kept_bytes"] = bar_chart(
            f"Kept for the backward pass: {where}", bars, ("kept, parameters excepted",), "B"
        )
    return charts


def write_account(account: Account, folder: Path) -> list[Path]:
    """Write every table as CSV and every chart as SVG, each in place of an earlier one; returns the files.

    :raises OSError: when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    common = {
        "shape": f"B={account.batch} S={account.seq}",
        "dtype": account.dtype,
        "rule": RULE,
        "versions": "; ".join(f"{package} {version}" for package, version in installed_versions().items()),
        "date": today(),
        "command": this_command(),
    }
    for name, rows in account.tables.items():
        if rows:
            stream = io.StringIO()
            columns = list(dict.fromkeys(column for row in rows for column in row))
            writer = csv.DictWriter(stream, [*columns, *common], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**row, **common} for row in rows)
            files.append(folder / f"{name}.csv")
            replace_file(files[-1], stream.getvalue())
    for name, text in account.charts.items():
        files.append(folder / f"{name}.svg")
        replace_file(files[-1], text + "\n")
    return files
