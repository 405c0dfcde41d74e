"""The tables of the README: rendered from result files, and up to date."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "tools" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXT = "before\n<!-- table: rows.csv | columns: name, time -->\nold\n<!-- /table -->\nafter <!-- table -->\n"


def test_a_place_is_filled_and_filled_again(tables: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name,device,time\na|b,cpu,1.5\nc,cpu,2\n")
    filled = tables.filled(TEXT, tmp_path)
    assert filled == TEXT.replace("old\n", "| name | time |\n| --- | --- |\n| a\\|b | 1.5 |\n| c | 2 |\n")
    assert tables.filled(filled, tmp_path) == filled


def test_a_missing_file_empties_the_place(tables: ModuleType, tmp_path: Path) -> None:
    assert tables.filled(TEXT, tmp_path) == TEXT.replace("old\n", "")


def test_json_rows_with_all_columns(tables: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"a": 1, "b": null}, {"a": 2}]')
    text = "<!-- table: rows.json -->\n<!-- /table -->"
    assert "| a | b |\n| --- | --- |\n| 1 | None |\n| 2 |  |\n" in tables.filled(text, tmp_path)


def test_what_cannot_be_rendered_is_refused(tables: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name\na\n")
    with pytest.raises(ValueError, match='column "time" is in none'):
        tables.filled(TEXT, tmp_path)
    (tmp_path / "rows.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="a list of objects is accepted"):
        tables.read_rows(tmp_path / "rows.json")
    with pytest.raises(ValueError, match=r'accepted are "\.csv" and "\.json"'):
        tables.read_rows(tmp_path / "rows.txt")


def test_the_readme_is_up_to_date(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert tables.PLACE.search(text), "the README has no place for measured rows"
    assert tables.filled(text, ROOT) == text, "run tools/readme_tables.py"
