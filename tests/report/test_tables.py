"""The tables as a terminal shows them."""

from __future__ import annotations

import io

from folders import hurts
from rich.console import Console

from lindt.report.tables import comparison, verdict_table
from lindt.report.verdict import points

SUMMARY = {
    "central": 0.8312, "local": 0.949, "private": 0.89, "beta": 0.059, "harmed": 12, "clearly_harmed": 7,
    "counted_clients": 15, "attack_local": 0.026, "detected_at": [126], "metric_in_percent": True,
    "negative": False, "scored_rounds": 10,
}  # fmt: skip


def rendered(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(comparison([("detect and recover", SUMMARY), ("alone", {"local": 0.5})], "title"))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_eighty_columns_hold_every_number() -> None:
    rows = [line.split() for line in rendered(80).splitlines()]
    assert ["detect", "and", "recover", "83.1", "94.9", "89.0", "+5.9", "12", "(7)/15", "2.6", "126"] in rows
    assert ["alone", "-", "50.0", "-", "-", "-", "-", "-"] in rows


def test_the_test_of_the_reports_has_a_table_of_its_own() -> None:
    told = SUMMARY | {"rounds": 10, "detection": hurts(recovering=True)[-1]["detection"]}
    rows = [("tested", told), ("by Delta", SUMMARY | {"rounds": 10}), ("alone", {"local": 0.5})]
    found = verdict_table(rows)
    assert found is not None
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(found)
    console.print(comparison(rows, "title"))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["verdict", "since", "gain", "warning", "w", "alone"] in lines
    assert ["tested", "hurts", "4", "-12.0", "+-", "2.0", "2", "helps", "helps"] in lines
    assert ["by", "Delta", "flagged", "126", "-", "-", "-", "-", "-"] in lines
    assert ["central", "local", "alone", "beta", "worse", "off", "backdoor"] in lines
    assert verdict_table([("by Delta", SUMMARY)]) is None


def test_points_are_what_people_read() -> None:
    assert points(0.0759, sign=True) == "+7.6"
    assert points(-1.25, percent=False) == "-1.2500"
    assert points(None) == "-"
