"""The command line: help without PyTorch, exit codes, one sentence for an error, JSON for machines."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import stepdown
from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import CacheError, DefinitionError, OptionError
from stepdown.models.presets import PRESETS, bert_tiny
from stepdown.pipeline.ablation import Ablation, Variant
from stepdown.pipeline.account import Account
from stepdown.pipeline.build_folder import read_build
from stepdown.pipeline.cache import BuildCache
from stepdown.pipeline.cli import COMMANDS, app
from stepdown.pipeline.commands import ablate as ablate_module
from stepdown.pipeline.commands import cache as cache_commands
from stepdown.pipeline.commands import compare as compare_module
from stepdown.pipeline.commands import compile as compile_module
from stepdown.pipeline.commands import report as report_module
from stepdown.pipeline.commands import train as train_module
from stepdown.pipeline.commands import verify as verify_module
from stepdown.pipeline.commands.fields import field_options, parameter_help
from stepdown.pipeline.commands.layer import choose_layer
from stepdown.pipeline.compare import Comparison, Measured
from stepdown.pipeline.results import read_rows
from stepdown.pipeline.training import TrainingOptions, TrainingResult

MODULE = [sys.executable, "-m", "stepdown.pipeline.cli"]


def call(*arguments: str | Path) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    """The one sentence on the standard error stream."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("stepdown: ")
    assert line.endswith(".")
    return line


# ---- the program ----


def test_help_needs_neither_torch_nor_dace() -> None:
    code = (
        "import sys; from stepdown.pipeline.cli import main; sys.argv = ['stepdown', '--help']\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'dace', 'numpy', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in COMMANDS)


def test_version() -> None:
    assert call("--version").stdout == f"stepdown {stepdown.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"stepdown {command}" in result.stdout or f" {command} " in result.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["inspect"], ["compile", "--nonsense"], ["compare", "--batch", "two"]]
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_an_error_is_one_sentence_without_a_traceback() -> None:
    done = subprocess.run([*MODULE, "inspect", "nowhere"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        'stepdown: "nowhere" is neither the folder of a build nor the first characters of a key in the cache.\n'
    )


def test_a_system_error_keeps_its_words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BuildCache) -> None:
        raise CacheError(13, 'The build cache "/x" cannot be read (Permission denied).')

    monkeypatch.setattr(BuildCache, "list", fail)
    assert refused(call("cache", "list")) == 'stepdown: The build cache "/x" cannot be read (Permission denied).'


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from stepdown.pipeline import cli\n"
        "from stepdown.pipeline.cache import BuildCache\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "def wait(self): print('waiting', flush=True); time.sleep(60)\n"
        "BuildCache.list = wait; sys.argv = ['stepdown', 'cache', 'list']; cli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors


# ---- which layer ----


def test_a_layer_from_a_preset_with_changes() -> None:
    assert choose_layer({"model": "BERT_tiny", "heads": None}).layer == bert_tiny.layer
    chosen = choose_layer({"model": "bert-tiny", "heads": 4, "dropout": 0.0, "causal": True})
    assert (chosen.layer.heads, chosen.layer.dropout, chosen.layer.causal) == (4, 0.0, True)
    assert chosen.name == "bert-tiny heads=4 dropout=0.0 causal=True"


def test_a_layer_from_a_file_and_from_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"embed": 8, "heads": 2, "ffn": 16, "norm": "pre"}))
    assert choose_layer({"model": str(file)}).layer == EncoderLayer(embed=8, heads=2, ffn=16, norm="pre")
    file.write_text(json.dumps(bert_tiny.layer.to_dict()))
    assert choose_layer({"model": str(file), "ffn": 64}).layer.ffn == 64
    assert choose_layer({"model": None, "embed": 8, "heads": 2, "ffn": 16}).layer == EncoderLayer(
        embed=8, heads=2, ffn=16
    )


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"embed": 8, "heads": 3, "ffn": 8}', '{"wings": 2}', '{"type": "bird"}']
)
def test_files_that_hold_no_layer_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DefinitionError):
        choose_layer({"model": str(tmp_path / "x.json")})


@pytest.mark.parametrize(
    "values", [{"model": None}, {"model": "bert-huge"}, {"model": None, "embed": 8}, {"model": "no/such/file.json"}]
)
def test_layers_that_cannot_be_named_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises((OptionError, DefinitionError)):
        choose_layer(values)


@pytest.mark.parametrize("cls", [EncoderLayer, TrainingOptions])
def test_every_field_is_an_option_with_a_help_text(cls: Any) -> None:
    parameters = field_options(cls, optional=True)
    assert [parameter.name for parameter in parameters] == [field.name for field in fields(cls)]
    assert set(parameter_help(cls)) >= {parameter.name for parameter in parameters}


# ---- compile ----


@dataclass
class Compiler:
    """Stands for the compiler: hands out a build made by hand."""

    path: Path
    cached: bool = False
    calls: list[tuple[EncoderLayer, dict[str, Any]]] = field(default_factory=list)

    @property
    def manifest(self) -> dict[str, Any]:
        return read_build(self.path).manifest

    def __call__(self, layer: EncoderLayer, **options: Any) -> "Compiler":
        options.pop("progress")("parse")
        self.calls.append((layer, options))
        return self


@pytest.fixture
def compiler(hand_made_build: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(hand_made_build)
    monkeypatch.setattr(compile_module, "compile_layer", found)
    return found


def test_compile_passes_everything_on_and_shows_the_stages(compiler: Compiler, tmp_path: Path) -> None:
    options = ["--batch", "2", "--seq", "3", "--dtype", "bf16", "--disable", "a", "--disable", "b", "--no-build"]
    options += ["--layouts", str(tmp_path / "layouts.json"), "--memory-budget", "1000"]
    result = call("compile", "bert-tiny", "--heads", "4", *options, "--optimize", "light", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    ((layer, given),) = compiler.calls
    assert layer.heads == 4
    assert given == {
        "batch": 2,
        "seq": 3,
        "dtype": "bf16",
        "target": "cpu",
        "disable": ["a", "b"],
        "layouts": tmp_path / "layouts.json",
        "memory_budget": 1000,
        "build": False,
        "optimize": "light",
        "output": tmp_path / "out",
    }
    assert "differentiate" in result.stdout
    assert f"BUILD {compiler.path}\nwithout a library, " in result.stdout


def test_compile_says_where_a_build_came_from(compiler: Compiler) -> None:
    assert f"BUILD {compiler.path}\ncompiled, " in call("compile", "bert-tiny").stdout
    compiler.cached = True
    assert f"BUILD {compiler.path}\nfrom the cache, " in call("compile", "bert-tiny").stdout
    printed = json.loads(call("compile", "bert-tiny", "--json").stdout)
    assert printed["path"] == str(compiler.path)
    assert printed["cached"] is True
    assert [stage["name"] for stage in printed["stages"]] == ["parse", "differentiate", "fuse"]


def test_compile_refuses_in_one_sentence(compiler: Compiler) -> None:
    assert '"bert-tny"' in refused(call("compile", "bert-tny"))
    assert "heads=3" in refused(call("compile", "bert-tiny", "--heads", "3"))
    assert "No layer is named" in refused(call("compile"))
    assert compiler.calls == []


# ---- inspect ----


def test_inspect_shows_the_table(hand_made_build: Path) -> None:
    result = call("inspect", hand_made_build, "--batch", "8", "--seq", "128")
    assert result.exit_code == 0, result.output
    assert "Counts are for B=8, S=128." in result.stdout


def test_inspect_json_is_what_the_design_says(hand_made_build: Path) -> None:
    printed = json.loads(call("inspect", hand_made_build, "--json", "--batch", "2", "--seq", "3").stdout)
    assert printed["layer"]["embed"] == 4
    assert printed["sizes"] == {"B": 2, "S": 3}
    stage = printed["stages"][1]
    assert {"name", "kernels", "containers", "flop", "bytes_moved", "kept_bytes", "forward", "backward"} <= set(stage)
    assert (stage["flop"], stage["forward"]["flop"], stage["backward"]["flop"]) == (1152, 384, 768)
    symbolic = json.loads(call("inspect", hand_made_build, "--json").stdout)
    assert symbolic["stages"][1]["flop"] == "192*B*S"


def test_inspect_lists_the_nodes_of_a_stage(hand_made_build: Path) -> None:
    text = call("inspect", hand_made_build, "--stage", "differentiate", "--batch", "2", "--seq", "3").stdout
    assert "differentiate, forward: 1 nodes" in text
    assert "differentiate, backward: 1 nodes" in text
    assert "project" in text
    assert "384 flop" in text
    (stage,) = json.loads(call("inspect", hand_made_build, "--stage", "parse", "--json").stdout)["stages"]
    (node,) = stage["nodes"]["forward"]
    assert (node["name"], node["dims"], node["flop"]) == ("project", "BSUE", "64*B*S")


def test_inspect_shows_operators(hand_made_build: Path, tmp_path: Path) -> None:
    text = call("inspect", hand_made_build, "--operators", "--batch", "2", "--seq", "3").stdout
    assert "operators after differentiate: 2 operators" in text
    assert "contraction" in text
    assert "No groups." in text
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"machine": "v100", "forward": {"project": 1e-6}}))
    arguments = ("--operators", "--stage", "parse", "--batch", "2", "--seq", "3", "--times", times)
    text = call("inspect", hand_made_build, *arguments).stdout
    assert "MUE is relative to 900 GB/s" in text
    found = json.loads(call("inspect", hand_made_build, *arguments, "--json").stdout)["operators"]
    assert found["stage"] == "parse"
    (operator,) = found["operators"]
    assert operator["bytes_moved"] == 48 * 6 + 128
    assert operator["bytes_by_dtype"] == {"float32": 48 * 6 + 128}
    assert operator["mue"] == pytest.approx(100 * (48 * 6 + 128) / 1e-6 / 900e9)


def test_inspect_shows_what_changed(hand_made_build: Path) -> None:
    arguments = ("--diff", "parse", "differentiate", "--batch", "2", "--seq", "3")
    text = call("inspect", hand_made_build, *arguments).stdout
    assert "parse → differentiate" in text
    assert "1 new" in text
    assert "No operator is gone." in text
    found = json.loads(call("inspect", hand_made_build, *arguments, "--json").stdout)["diff"]
    assert found["totals"]["forward"]["flop"] == [384, 384]
    assert [change["name"] for change in found["new"]] == ["project"]


def test_inspect_writes_pages(hand_made_build: Path, tmp_path: Path) -> None:
    result = call("inspect", hand_made_build, "--html", tmp_path / "pages")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "pages" / "index.html").as_uri() in result.stdout


def test_inspect_refuses_in_one_sentence(hand_made_build: Path, tmp_path: Path) -> None:
    assert '"lower" is unknown' in refused(call("inspect", hand_made_build, "--stage", "lower"))
    assert '"fuse" left no graph' in refused(call("inspect", hand_made_build, "--stage", "fuse"))
    assert '"batch" is 0' in refused(call("inspect", hand_made_build, "--batch", "0"))
    assert "is not a build" in refused(call("inspect", tmp_path))
    assert '"fuse" left no graph' in refused(call("inspect", hand_made_build, "--diff", "parse", "fuse"))
    assert 'machine "abacus" is unknown' in refused(call("inspect", hand_made_build, "--machine", "abacus"))
    assert "cannot be read" in refused(call("inspect", hand_made_build, "--times", tmp_path / "none.json"))
    (tmp_path / "file").touch()
    assert "is a file" in refused(call("inspect", hand_made_build, "--html", tmp_path / "file"))


def test_pages_into_a_folder_that_cannot_be_made_are_refused(hand_made_build: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file/pages" in refused(call("inspect", hand_made_build, "--html", tmp_path / "file" / "pages"))


# ---- verify, compare, train, cache ----


@dataclass
class Report:
    """Stands for a verification's report."""

    passed: bool

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def __rich__(self) -> str:
        return "every result"


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify_fails_with_1(monkeypatch: pytest.MonkeyPatch, passed: bool, code: int) -> None:
    calls: list[tuple[Any, ...]] = []

    def verify(layer: EncoderLayer, dtype: str, batch: int, seq: int, **options: Any) -> Report:
        calls.append((layer, dtype, batch, seq, options["dropout"], options["draws"]))
        options["on_draw"](1)
        return Report(passed)

    monkeypatch.setattr(verify_module, "verify_definition", verify)
    arguments = ["verify", "bert-tiny", "--dtype", "fp16", "--batch", "3", "--seq", "7", "--no-dropout", "--draws", "4"]
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (code, "every result\n")
    assert calls == [(bert_tiny.layer, "fp16", 3, 7, False, 4)]
    result = call(*arguments, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (code, {"passed": passed})


def test_verify_refuses_in_one_sentence() -> None:
    assert "bert-huge" in refused(call("verify", "bert-huge"))
    assert '"seq" is 0' in refused(call("verify", "bert-tiny", "--seq", "0"))
    assert 'mask "diagonal" is unknown' in refused(call("verify", "bert-tiny", "--mask", "diagonal"))


def test_compare_refuses_before_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(compare_module, "compare_layer", never)
    assert '"jax" was given to compare against' in refused(call("compare", "bert-tiny", "--against", "eager,jax"))
    assert "neither JSON nor CSV" in refused(call("compare", "bert-tiny", "--out", tmp_path / "rows.txt"))
    assert '"threads" is 0' in refused(call("compare", "bert-tiny", "--threads", "0"))


def test_compare_shows_and_saves_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(name: str, layer: EncoderLayer, **options: Any) -> Comparison:
        options["report"]("measuring")
        ours = Measured("stepdown", {"forward": [0.002] * 3, "forward+backward": [0.006] * 3}, 12_600_000, 1e-7, 2e-7)
        eager = Measured("eager", {"forward": [0.004] * 3, "forward+backward": [0.005] * 3}, 20_000_000)
        dtype = resolve_dtype(options["dtype"])
        return Comparison(name, layer, options["batch"], options["seq"], dtype, 2, (ours, eager))

    monkeypatch.setattr(compare_module, "compare_layer", measure)
    arguments = ["compare", "bert-tiny", "--against", "eager", "--batch", "3", "--seq", "7"]
    result = call(*arguments, "--out", str(tmp_path / "rows.csv"))
    assert result.exit_code == 0, result.output
    cells = {line.split()[0]: " ".join(line.split()) for line in result.stdout.splitlines() if line.strip()}
    assert cells["stepdown"] == "stepdown 2 ms ± 0 µs 6 ms ± 0 µs 12.6 MB 1.0e-07 2.0e-07"
    assert cells["eager"] == "eager 4 ms ± 0 µs 0.50 5 ms ± 0 µs 1.20 20.0 MB 0.0e+00 0.0e+00"
    printed = json.loads(call(*arguments, "--json").stdout)
    assert [row["median"] for row in printed] == [2, 6, 4, 5]
    assert [row.median for row in read_rows(tmp_path / "rows.csv")] == [2, 6, 4, 5]


def test_ablate_shows_and_saves_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def measure(name: str, layer: EncoderLayer, **options: Any) -> Ablation:
        options["report"]("measuring")
        asked.append(options)
        counts = {"words": 2_000_000, "kept_bytes": 4_000_000, "kernels": 9}
        full = Measured("every pass", {"forward": [0.002] * 3, "forward+backward": [0.006] * 3})
        less = Measured("without x", {"forward": [0.003] * 3, "forward+backward": [0.009] * 3})
        variants = (Variant("every pass", (), counts, full), Variant("without x", ("x",), counts, less))
        return Ablation(name, layer, options["batch"], options["seq"], "float32", 2, variants)

    monkeypatch.setattr(ablate_module, "ablate_layer", measure)
    arguments = ["ablate", "bert-tiny", "--batch", "3", "--seq", "7"]
    result = call(*arguments, "--out", str(tmp_path / "rows.csv"))
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "every pass 2 ms ± 0 µs 6 ms ± 0 µs 2.00 M 4.00 MB 9" in lines
    assert "without x 3 ms ± 0 µs 1.50 9 ms ± 0 µs 1.50 2.00 M 4.00 MB 9" in lines
    rows = read_rows(tmp_path / "rows.csv")
    assert [row.values["against_every_pass"] for row in rows] == [1, 1, 1.5, 1.5]
    assert asked[0]["passes"] is None
    call(*arguments, "--pass", "recompute", "--pass", "fold-scales", "--json")
    assert asked[1]["passes"] == ["recompute", "fold-scales"]


def test_ablate_and_report_refuse_in_one_sentence(tmp_path: Path) -> None:
    asked = call("ablate", "bert-tiny", "--pass", "lower-operators")
    assert '"lower-operators" cannot be switched off' in refused(asked)
    assert "neither JSON nor CSV" in refused(call("ablate", "bert-tiny", "--out", tmp_path / "rows.txt"))
    assert '"threads" is 0' in refused(call("ablate", "bert-tiny", "--threads", "0"))
    assert 'machine "abacus" is unknown' in refused(call("report", "bert-tiny", "--machine", "abacus"))
    assert '"seq" is 0' in refused(call("report", "bert-tiny", "--seq", "0"))


def test_report_writes_tables_and_fills_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def count(name: str, layer: EncoderLayer, **options: Any) -> Account:
        options["progress"]("counting")
        rows = [{"layer": name, "after pass": "fuse", "Mwords": 1.5}]
        return Account(name, options["batch"], options["seq"], "float32", {"words_by_pass": rows}, {"bars": "<svg/>"})

    monkeypatch.setattr(report_module, "account_for", count)
    page = "<!-- table: results/words_by_pass.csv | columns: after pass, Mwords -->\n<!-- /table -->\n"
    (tmp_path / "README.md").write_text(page)
    result = call("report", "bert-tiny", "--batch", "2", "--seq", "8", "--out", tmp_path / "results")
    assert result.exit_code == 0, result.output
    assert "Words moved by a training step after every pass" in result.stdout
    assert (tmp_path / "results" / "bars.svg").read_text() == "<svg/>\n"
    assert "| fuse | 1.5 |" in (tmp_path / "README.md").read_text()
    assert json.loads(call("report", "bert-tiny", "--json").stdout)["words_by_pass"][0]["Mwords"] == 1.5


def test_train_makes_options_of_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TrainingOptions] = []

    def train(options: TrainingOptions) -> TrainingResult:
        seen.append(options)
        return TrainingResult(
            losses=(5.0, 4.0),
            resumed_from=0,
            seconds=1.0,
            tokens_per_second=1000.0,
            peak_memory=None,
            parameters=10,
            vocabulary=64,
            blocks=3,
            initial_weights="00",
            checkpoint=tmp_path / "checkpoint",
            curve_csv=tmp_path / "loss.csv",
            curve_png=tmp_path / "loss.png",
            build=None,
        )

    monkeypatch.setattr(train_module, "train", train)
    text = tmp_path / "text"
    arguments = [
        "train",
        "--text",
        str(text),
        "-o",
        str(tmp_path),
        "--model",
        "bert-tiny",
        "--backend",
        "torch",
        "--steps",
        "2",
    ]
    result = call(*arguments, "--learning-rate", "0.01", "--resume")
    assert result.exit_code == 0, result.output
    assert "5.0000 → 4.0000 in 2 steps" in result.stdout
    expected = TrainingOptions(
        text=text, out=tmp_path, model="bert-tiny", backend="torch", steps=2, learning_rate=0.01, resume=True
    )
    assert seen == [expected]
    assert json.loads(call(*arguments, "--json").stdout)["losses"] == [5.0, 4.0]
    assert call(*arguments, "--lr", "0.01", "--resume").exit_code == 0
    assert seen[-1] == expected
    assert '"learning_rate" is -1.0' in refused(call(*arguments, "--lr", "-1"))
    assert '"warmup" is 2' in refused(call(*arguments, "--warmup", "2"))
    assert call("train").exit_code == 2


@pytest.fixture
def filled_cache(tmp_path: Path, hand_made_build: Path, monkeypatch: pytest.MonkeyPatch) -> BuildCache:
    """A cache with two entries, which is the one that the commands use."""
    cache = BuildCache(tmp_path / "cache")
    content = (hand_made_build / "manifest.json").read_bytes()

    def build(folder: Path) -> None:
        (folder / "manifest.json").write_bytes(content)

    for key in ("aa" * 32, "bb" * 32):
        cache.entry(key, build)
    monkeypatch.setattr(cache_commands, "BuildCache", lambda: cache)
    return cache


def test_cache_commands(filled_cache: BuildCache) -> None:
    text = call("cache", "list").stdout
    assert "aaaaaaaaaaaa" in text
    assert "embed=4" in text
    listed = json.loads(call("cache", "list", "--json").stdout)
    assert {entry["key"] for entry in listed["entries"]} == {"aa" * 32, "bb" * 32}
    assert "no entry" in refused(call("cache", "remove", "cc"))
    assert call("cache", "remove", "aa").stdout.startswith("Removed 1 build, ")
    assert call("cache", "path").stdout.strip() == str(filled_cache.root)
    (removed,) = json.loads(call("cache", "clear", "--json").stdout)["removed"]
    assert removed["key"] == "bb" * 32
    assert call("cache", "list").stdout.startswith("0 builds, 0 B, in ")


def test_presets_are_listed_where_they_are_asked_for() -> None:
    text = "".join(call("compile", "--help").stdout.split())  # lines break inside names
    assert all(name in text for name in PRESETS)
