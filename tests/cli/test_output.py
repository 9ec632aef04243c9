"""Tables, progress and numbers, as every verb prints them."""

import time

import pytest

from loopformer.cli.output import duration, number, print_table, progress


def test_cells_are_plain_text_and_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "loss"], [["[bold]a[/bold]", "3.2"], ["b", "13.21"]], left=1)
    assert capsys.readouterr().out.splitlines() == [
        "name             loss",
        "[bold]a[/bold]    3.2",
        "b               13.21",
    ]


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress("tokens") as report:
        report("news", 1000, 10_000)  # what was there before counts for no speed
        for now in (4.0, 6.0, 8.0):
            report("news", 1000 + int(500 * now), 10_000)
        now = 12.0
        report("books", 5, None)
    assert capsys.readouterr().err.splitlines() == [
        "news: 4,000 of 10,000 tokens, 500 tokens/s, about 12 s left",
        "books: 5 tokens",
    ]


def test_numbers_and_durations() -> None:
    assert (number(1.23456, ".3f"), number(None, ".3f"), number(None, ".3f", missing="-")) == (
        "1.235",
        "not a number",
        "-",
    )
    assert [duration(seconds) for seconds in (8, 90, 5400)] == ["8 s", "1.5 minutes", "1.5 hours"]
