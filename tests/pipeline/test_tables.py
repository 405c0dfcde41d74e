"""Tables in Markdown files: rendered from result files, filtered, refused, and filled page by page."""

from pathlib import Path

import pytest

from stepdown.pipeline.tables import fill_pages, filled, pages_with_tables, read_rows

TEXT = "before\n<!-- table: rows.csv | columns: name, time -->\nold\n<!-- /table -->\nafter <!-- table -->\n"


def test_a_place_is_filled_and_filled_again(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name,device,time\na|b,cpu,1.5\nc,cpu,2\n")
    once = filled(TEXT, tmp_path)
    assert once == TEXT.replace("old\n", "| name | time |\n| --- | --- |\n| a\\|b | 1.5 |\n| c | 2 |\n")
    assert filled(once, tmp_path) == once


def test_a_missing_file_empties_the_place(tmp_path: Path) -> None:
    assert filled(TEXT, tmp_path) == TEXT.replace("old\n", "")


def test_json_rows_with_all_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"a": 1, "b": null}, {"a": 2}]')
    text = "<!-- table: rows.json -->\n<!-- /table -->"
    assert "| a | b |\n| --- | --- |\n| 1 | None |\n| 2 |  |\n" in filled(text, tmp_path)


def test_what_cannot_be_rendered_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name\na\n")
    with pytest.raises(ValueError, match='column "time" is in none'):
        filled(TEXT, tmp_path)
    (tmp_path / "rows.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="a list of objects is accepted"):
        read_rows(tmp_path / "rows.json")
    with pytest.raises(ValueError, match=r'accepted are "\.csv" and "\.json"'):
        read_rows(tmp_path / "rows.txt")


def test_rows_are_chosen_by_a_value(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name,case\na,one\nb,two\n")
    text = "<!-- table: rows.csv | columns: name | where: case=two -->\n<!-- /table -->"
    assert "| name |\n| --- |\n| b |\n" in filled(text, tmp_path)
    with pytest.raises(ValueError, match='column "time" is in none'):
        filled(text.replace("case=", "time="), tmp_path)


def test_pages_are_filled_once(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name,time\na,1\n")
    (tmp_path / "README.md").write_text(TEXT)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "plain.md").write_text("no place\n")
    (tmp_path / "docs" / "rows.md").write_text(TEXT)
    pages = [tmp_path / "README.md", tmp_path / "docs" / "rows.md"]
    assert pages_with_tables(tmp_path) == pages
    assert fill_pages(tmp_path, write=False) == pages
    assert (tmp_path / "README.md").read_text() == TEXT
    assert fill_pages(tmp_path) == pages
    assert "| a | 1 |" in pages[1].read_text()
    assert fill_pages(tmp_path) == []
