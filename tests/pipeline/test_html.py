"""The pages of a build: links, escaping, costs on the nodes, and what a browser makes of them."""

import gzip
import json
import pickle
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stepdown.models.errors import CanonicalFormError, OptionError
from stepdown.pipeline.analysis.html import write_html
from stepdown.pipeline.analysis.listing import list_nodes, load_graph
from stepdown.pipeline.build_folder import read_build

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
OFFLINE = ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--enable-unsafe-swiftshader"]


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
    "content", [b"", b"\x1f\x8bnot gzip", gzip.compress(b"[]"), gzip.compress(b"{}"), pickle.dumps(Trap())]
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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
@pytest.mark.slow
def test_a_browser_draws_a_graph_from_disk_without_a_network(pages: Path, tmp_path: Path) -> None:
    page = pages / "stages" / "01-differentiate.backward.html"
    command = [
        str(CHROMIUM),
        *BROWSER,
        *OFFLINE,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    assert 'data-shown="1"' in dom  # one state in the graph that the viewer laid out
    assert "<canvas" in dom
    assert dom.count('<svg class="icon"') >= 8
    assert ">fit_screen<" not in dom
