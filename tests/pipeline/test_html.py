"""The pages of a build: links, escaping, costs on the nodes, and what a browser makes of them."""

import gzip
import json
import pickle
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stepdown.models.errors import CanonicalFormError, OptionError
from stepdown.pipeline.analysis.build_stages import analyze_stage
from stepdown.pipeline.analysis.html import write_html
from stepdown.pipeline.analysis.listing import list_edges, list_nodes, load_graph
from stepdown.pipeline.analysis.machine import MACHINES, MeasuredTimes
from stepdown.pipeline.analysis.operators import by_bytes
from stepdown.pipeline.build_folder import BuildFolder, read_build

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
BROWSER = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
# Every host name fails, so that a page that needs the network cannot pass.
OFFLINE = [
    "--window-size=1500,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=20000",
    "--enable-unsafe-swiftshader",
]


class Links(HTMLParser):
    """What a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value and value != "#"]


@pytest.fixture
def pages(hand_made_build: Path, tmp_path: Path) -> Path:
    """The written folder."""
    assert (
        write_html(read_build(hand_made_build), tmp_path / "html", batch=2, seq=3) == tmp_path / "html" / "index.html"
    )
    return tmp_path / "html"


def saved_graph(page: Path) -> dict:
    """The graph that a page hands to the viewer."""
    (literal,) = re.findall(r"const savedGraph = (.*);</script>", page.read_text())
    return json.loads(json.loads(literal))


def test_every_stage_and_direction_has_a_page(pages: Path) -> None:
    assert sorted(path.name for path in (pages / "stages").iterdir()) == [
        "00-parse.forward.html",
        "01-differentiate.backward.html",
        "01-differentiate.forward.html",
    ]


def test_every_reference_is_a_file_of_the_folder(pages: Path) -> None:
    for page in pages.rglob("*.html"):
        if "viewer" in page.parts:
            continue
        links = Links()
        links.feed(page.read_text())
        assert links.found
        for link in links.found:
            assert "://" not in link
            assert (page.parent / link).resolve().is_relative_to(pages.resolve())
            assert (page.parent / link).is_file(), link


def test_the_index_has_numbers_and_escapes_what_it_shows(pages: Path) -> None:
    index = (pages / "index.html").read_text()
    assert "1 operator from &lt;the program&gt;" in index
    assert "1.15 kflop" in index
    assert "-50.0 %" in index
    assert "Counts are for B=2, S=3." in index
    assert "2 states became 1" in index


def test_nodes_carry_their_costs(pages: Path) -> None:
    graph = saved_graph(pages / "stages" / "00-parse.forward.html")
    labels = [node["label"] for node in graph["nodes"][0]["nodes"]]
    assert "project · 384 flop · 416 B" in labels


def test_symbols_are_letters(hand_made_build: Path, stage_graphs: Path, tmp_path: Path) -> None:
    text = gzip.decompress((stage_graphs / "00-parse.forward.sdfgz").read_bytes())
    (hand_made_build / "stages").unlink()
    (hand_made_build / "stages").mkdir()
    written_out = text.replace(b'"$B"', b'"symbol($B, dtype=dace.int64, nonzero=True, positive=True)"')
    assert written_out != text
    (hand_made_build / "stages" / "00-parse.forward.sdfgz").write_bytes(gzip.compress(written_out))
    write_html(read_build(hand_made_build), tmp_path / "html")
    graph = saved_graph(tmp_path / "html" / "stages" / "00-parse.forward.html")
    assert graph["attributes"]["_arrays"]["x"]["attributes"]["shape"] == ["B", "$S", "4"]


def test_a_graph_cannot_end_the_script_it_stands_in(pages: Path) -> None:
    text = (pages / "stages" / "00-parse.forward.html").read_text()
    (literal,) = re.findall(r"const savedGraph = (.*);</script>", text)
    assert "<" not in literal


def test_listing_of_operators_and_maps(stage_graphs: Path) -> None:
    (record,) = list_nodes(load_graph(stage_graphs / "00-parse.forward.sdfgz"))
    assert (record.name, record.kind, record.dims, record.detail) == ("project", "Contraction", "BSUE", "BSE,UE->BSU")
    assert (record.inputs, record.outputs) == (("w", "x"), ("y",))
    assert record.flop == "64*B*S"
    assert record.bytes_moved == "48*B*S + 128"
    lowered = load_graph(stage_graphs / "00-parse.forward.sdfgz")
    lowered.expand_library_nodes()
    records = list_nodes(lowered, {"B": 2, "S": 3})
    assert records
    assert "Contraction" not in {record.kind for record in records}


class Trap:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x1f\x8bnot gzip", gzip.compress(b"[]", mtime=0), gzip.compress(b"{}", mtime=0), pickle.dumps(Trap())],
)
def test_a_damaged_graph_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.sdfgz").write_bytes(content)
    with pytest.raises(CanonicalFormError, match="cannot be read as an SDFG"):
        load_graph(tmp_path / "x.sdfgz")


def test_an_unknown_library_node_is_refused(stage_graphs: Path, tmp_path: Path) -> None:
    text = gzip.decompress((stage_graphs / "00-parse.forward.sdfgz").read_bytes())
    (tmp_path / "x.sdfgz").write_bytes(gzip.compress(text.replace(b"contraction.Contraction", b"contraction.Gone")))
    with pytest.raises(CanonicalFormError, match="whose class is not installed"):
        load_graph(tmp_path / "x.sdfgz")


def test_pages_replace_earlier_ones_and_nothing_else(pages: Path, hand_made_build: Path, tmp_path: Path) -> None:
    (pages / "stages" / "99-gone.forward.html").write_text("old")
    write_html(read_build(hand_made_build), pages)
    assert not (pages / "stages" / "99-gone.forward.html").exists()
    assert "64*B*S" in (pages / "index.html").read_text()
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.tex").write_text("keep me")
    with pytest.raises(OptionError, match="holds other files"):
        write_html(read_build(hand_made_build), other)
    with pytest.raises(OptionError, match="is a file"):
        write_html(read_build(hand_made_build), other / "thesis.tex")
    assert (other / "thesis.tex").read_text() == "keep me"


# ---- operators, charts, groups ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer_pages(stages_build: BuildFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of a real layer, every stage."""
    return write_html(stages_build, tmp_path_factory.mktemp("layer") / "html", batch=2, seq=16).parent


def charts(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg xmlns.*?</svg>", text)]


def test_the_index_has_every_stage_with_its_operators(layer_pages: Path, stages_build: BuildFolder) -> None:
    text = (layer_pages / "index.html").read_text()
    assert re.findall(r'class="analysis" data-stage="(\w+)"', text) == list(stages_build.stage_names)
    assert len(charts(text)) == 1 + 2 * len(stages_build.stage_names)
    assert 'data-chosen="layout"' in text
    assert "fuse-attention" in text


def test_operators_are_sorted_by_bytes(layer_pages: Path) -> None:
    text = (layer_pages / "index.html").read_text()
    for section in text.split('class="analysis"')[1:]:
        rows = section.split("<tbody>")[1].split("</tbody>")[0].split("</tr>")[:-1]
        moved = [float(re.findall(r'data-value="([^"]*)"', row)[3]) for row in rows]
        assert moved == sorted(moved, reverse=True)


def test_groups_are_listed_with_their_operators(layer_pages: Path) -> None:
    text = (layer_pages / "index.html").read_text().replace("<wbr>", "")
    (fused,) = [section for section in text.split('class="analysis"') if section.startswith(' data-stage="fuse"')]
    groups = fused.split('class="groups"')[1]
    assert "TiledGroup" in groups
    assert re.search(r"Softmax</span> attention_weights", groups)
    (parsed,) = [section for section in text.split('class="analysis"') if section.startswith(' data-stage="parse"')]
    assert "No groups" in parsed


def test_symbolic_pages_have_no_charts(pages: Path, hand_made_build: Path, tmp_path: Path) -> None:
    write_html(read_build(hand_made_build), tmp_path / "symbolic")
    text = (tmp_path / "symbolic" / "index.html").read_text()
    assert not charts(text)
    assert "Charts need numbers" in text
    assert charts((pages / "index.html").read_text())


def test_times_are_shown(hand_made_build: Path, tmp_path: Path) -> None:
    times = MeasuredTimes(MACHINES["v100"], {"forward": {"project": 2e-6}, "backward": {"project": 2e-6}})
    write_html(read_build(hand_made_build), tmp_path / "timed", batch=2, seq=3, times=times)
    text = (tmp_path / "timed" / "index.html").read_text()
    assert ">MUE</th>" in text
    assert "time, measured" in text
    assert "flop/s, measured" in text


def test_edges_carry_bytes(pages: Path) -> None:
    graph = saved_graph(pages / "stages" / "00-parse.forward.html")
    moved = [edge["attributes"]["data"]["attributes"]["stepdown_bytes"] for edge in graph["nodes"][0]["edges"]]
    assert sorted(moved) == [16 * 6, 128, 32 * 6]


def test_edges_are_listed_outside_maps(stage_graphs: Path) -> None:
    lowered = load_graph(stage_graphs / "00-parse.forward.sdfgz")
    assert [edge.bytes_moved for edge in list_edges(lowered)] == ["16*B*S", 128, "32*B*S"]
    lowered.expand_library_nodes()
    assert {edge.bytes_moved for edge in list_edges(lowered, {"B": 2, "S": 3})} == {96, 128, 192}


# ---- in a browser ----------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")


def browse(page: Path, tmp_path: Path, actions: str = "") -> str:
    """What a browser without a network makes of ``page``, after the script ``actions`` ran in it."""
    shown = page.with_name(f"acted-{page.name}")
    script = f"<script>window.addEventListener('load', () => {{ {actions} }});</script>"
    shown.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    command = [
        str(CHROMIUM),
        *BROWSER,
        *OFFLINE,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        shown.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


@needs_browser
@pytest.mark.slow
def test_a_browser_draws_a_graph_from_disk_without_a_network(pages: Path, tmp_path: Path) -> None:
    dom = browse(pages / "stages" / "01-differentiate.backward.html", tmp_path)
    assert 'data-shown="1"' in dom  # one state in the graph that the viewer laid out
    assert 'data-edges="3"' in dom
    assert "<canvas" in dom
    assert dom.count('<svg class="icon"') >= 8
    assert ">fit_screen<" not in dom


COLOURS = """
const count = () => {
    const canvas = Array.from(document.querySelectorAll("canvas")).sort((a, b) => b.width - a.width)[0];
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let hot = 0;
    for (let i = 0; i < data.length; i += 4) {
        hot += data[i] > 200 && data[i + 1] < 130 && data[i + 2] < 60;
    }
    return hot;
};
// Frames come when the browser likes: what is asked for is awaited, for a while.
const until = (wanted, done, tries = 30) => {
    const hot = count();
    if (wanted(hot) || !tries) {
        done(hot);
    } else {
        setTimeout(() => until(wanted, done, tries - 1), 200);
    }
};
const wait = setInterval(() => {
    if (document.body.dataset.shown) {
        clearInterval(wait);
        until((hot) => hot > 100, (hot) => {
            document.body.dataset.hot = hot;
            document.getElementById("bytes").click();
            until((cold) => cold === 0, (cold) => { document.body.dataset.cold = cold; });
        });
    }
}, 100);
"""


@needs_browser
@pytest.mark.slow
def test_a_browser_heats_the_edges_and_stops_when_told(layer_pages: Path, tmp_path: Path) -> None:
    dom = browse(layer_pages / "stages" / "03-fuse.backward.html", tmp_path, COLOURS)
    (hot,) = re.findall(r'data-hot="(\d+)"', dom)
    (cold,) = re.findall(r'data-cold="(\d+)"', dom)
    assert int(hot) > 100, "edges that move much are red and orange"
    assert int(cold) == 0, hot


CLICKS = """
const out = {};
const section = () => document.querySelector(".analysis:not([hidden])");
const first = () => section().querySelector("table.operators tbody tr td").textContent;
const headings = () => Array.from(section().querySelectorAll("table.operators th"));
const column = (name) => headings().find((heading) => heading.textContent === name);
out.stage = section().dataset.stage;
out.byBytes = first();
column("flop").click();
out.byFlop = first();
column("flop").click();
out.byLeastFlop = first();
column("operator").click();
out.byName = first();
const chooser = document.getElementById("stage");
chooser.value = "parse";
chooser.dispatchEvent(new Event("change"));
out.chosen = section().dataset.stage;
out.visible = document.querySelectorAll(".analysis:not([hidden])").length;
const link = document.querySelector('a[data-stage="differentiate"][href*="backward"]');
link.click();
out.clicked = section().dataset.stage;
out.title = document.getElementById("shown").textContent;
out.width = document.documentElement.scrollWidth - document.documentElement.clientWidth;
out.charts = section().querySelectorAll("svg").length;
document.body.dataset.out = JSON.stringify(out);
"""


@needs_browser
@pytest.mark.slow
def test_a_browser_clicks_through_the_index(layer_pages: Path, stages_build: BuildFolder, tmp_path: Path) -> None:
    dom = browse(layer_pages / "index.html", tmp_path, CLICKS)
    (text,) = re.findall(r'data-out="([^"]*)"', dom)
    out = json.loads(unescape(text))
    _, analysis = analyze_stage(stages_build, "layout", {"B": 2, "S": 16})
    names = [record.name for record in by_bytes(analysis.operators)]
    by_flop = {record.name: float(record.flop) for record in analysis.operators}
    assert out["stage"] == "layout"
    assert out["byBytes"] == names[0]
    assert by_flop[out["byFlop"]] == max(by_flop.values())
    assert by_flop[out["byLeastFlop"]] == min(by_flop.values())
    assert out["byName"] == min(names)
    assert (out["chosen"], out["visible"], out["clicked"]) == ("parse", 1, "differentiate")
    assert out["title"] == "Graph: differentiate, backward"
    assert out["charts"] == 2
