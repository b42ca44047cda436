"""A run's results as Python values: the verdict's fields, tables with and without pandas, the view for notebooks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from folders import SICK, WELL, decision, detection, gain_plan, hurts, line, mended, scores, write_run

from lindt.report import results
from lindt.report.reading import read_run
from lindt.report.results import PlainTable, results_html, round_table, run_verdict, score_table
from lindt.report.tables import CLIENT_COLUMNS, ROUND_COLUMNS
from lindt.report.verdict import verdict


@pytest.fixture
def _without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "find_spec", lambda _name: None)


def test_the_fields_of_a_tested_run(tmp_path: Path) -> None:
    told = detection(
        decision("hurts", -0.12, since=4), warning=2, recovery=decision("helps", 0.1), recovered=decision("undecided")
    )
    found = run_verdict(
        read_run(
            write_run(
                tmp_path,
                [line(1), line(2, detection=told, scores=scores([-0.3, -0.05, 0.0, 0.2]))],
                the_plan=gain_plan(),
            )
        )
    )
    assert (found.state, found.tone, found.gain, found.error, found.since) == ("hurts", "hurts", -0.12, 0.01, 4)
    assert (found.warning, found.recovery, found.recovered) == (2, "helps", "undecided")
    assert (found.round, found.beta, found.median_gain) == (2, pytest.approx(-0.0375), pytest.approx(-0.025))
    assert (found.better, found.unchanged, found.worse) == (1, 1, 2)
    assert (found.clearly_better, found.clearly_worse) == ((3,), (0,))
    assert str(found) == found.sentence == verdict(read_run(tmp_path)).sentence


def test_by_delta_the_state_is_the_tone(tmp_path: Path) -> None:
    found = run_verdict(read_run(write_run(tmp_path, mended())))
    assert (found.state, found.gain, found.since) == ("helps", None, None)
    assert found.clearly_better == (1, 2)


def test_before_anything_is_known_nothing_is_claimed(tmp_path: Path) -> None:
    found = run_verdict(read_run(write_run(tmp_path, [], ended=False)))
    assert (found.state, found.beta, found.better, found.clearly_worse) == ("waiting", None, None, None)
    assert "No round" in results_html(read_run(tmp_path))
    assert len(score_table(read_run(tmp_path))) == 0


def test_where_nothing_is_known_sample_by_sample_no_client_is_called_clear(tmp_path: Path) -> None:
    """As for a Flower app that scores clients as a whole: nobody clearly worse off would be a claim."""
    unclear = scores([-0.3, 0.2], clear=[False, False], clearly_better=None, clearly_harmed=None)
    run = read_run(write_run(tmp_path, [line(1, scores=unclear)]))
    found = run_verdict(run)
    assert (found.worse, found.clearly_worse, found.clearly_better) == (1, None, None)
    assert "clearly" not in results_html(run)


@pytest.mark.usefixtures("_without_pandas")
def test_tables_without_pandas(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, mended()))
    rounds, clients = round_table(run), score_table(run)
    assert list(rounds) == list(rounds.columns) == [*ROUND_COLUMNS, "gradient/fc1", "score/fc1"]
    assert rounds["round"] == list(range(1, 11))
    assert list(clients.columns) == list(CLIENT_COLUMNS)
    assert [(row["client"], row["round"], row["beta"]) for row in clients.to_dict("records")] == [
        (0, 10, 0.02),
        (1, 10, 0.1),
        (2, 10, 0.2),
    ]
    assert repr(clients[["client", "beta", "clear"]]).splitlines() == [
        "client  beta  clear",
        "     0  0.02  False",
        "     1   0.1   True",
        "     2   0.2   True",
    ]
    with pytest.raises(KeyError, match=r"'betta' is not a column; choose among run, name"):
        clients["betta"]
    with pytest.raises(KeyError, match="'betta' is not a column"):
        clients[["client", "betta"]]
    with pytest.raises(ValueError, match="has only 'records'"):
        clients.to_dict("list")


@pytest.mark.usefixtures("_without_pandas")
def test_a_long_table_is_printed_in_part_and_says_so(tmp_path: Path) -> None:
    many = scores([0.01] * 30)
    shown = repr(score_table(read_run(write_run(tmp_path, [line(1, scores=many)])))).splitlines()
    assert len(shown) == 1 + 20 + 2
    assert shown[-2] == "and 10 more rows"
    assert shown[-1].startswith("and ")
    assert all(len(text) <= results.WIDTH for text in shown[:-2])
    assert repr(PlainTable([], ["a"])) == "a"


def test_rows_are_copies() -> None:
    table = PlainTable([{"a": 1}], ["a", "b"])
    table.to_dict("records")[0]["a"] = 2
    assert table.to_dict("records") == [{"a": 1, "b": None}]


def test_pandas_has_the_same_values_and_keeps_whole_numbers_whole(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    run = read_run(write_run(tmp_path, hurts(recovering=True), the_plan=gain_plan()))
    frame: Any = round_table(run)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(ROUND_COLUMNS)
    assert str(frame["since"].dtype) == "Int64"
    assert frame["since"].dropna().tolist() == [4] * 7
    assert frame["verdict"].tolist()[-1] == "hurts"
    clients: Any = score_table(run)
    assert clients[["client", "beta"]].to_dict("records")[0]["client"] == 0
    assert str(clients["clear"].dtype) == "boolean"


def test_pandas_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, so that this is tested where pandas is not installed."""
    module: Any = ModuleType("pandas")
    module.Series = lambda values, dtype: (dtype, values)
    module.DataFrame = dict
    monkeypatch.setitem(sys.modules, "pandas", module)
    monkeypatch.setattr(results, "find_spec", lambda _name: object())
    found: Any = score_table(read_run(write_run(tmp_path, [line(1, scores=SICK)])))
    assert found["client"] == ("Int64", [0, 1, 2])
    assert found["clear"][0] == "boolean"
    assert found["run"] == ("object", [tmp_path.name] * 3)


def test_a_notebook_shows_the_verdict_the_counts_and_the_scores(tmp_path: Path) -> None:
    shown = results_html(read_run(write_run(tmp_path, [line(10, scores=WELL)])))
    assert "<b>Federation helps</b>" in shown
    betas = [one["beta"] for one in WELL["clients"]]
    assert f"better off {sum(beta > 0 for beta in betas)}, unchanged" in shown
    assert shown.count("<tr>") == 1 + len(betas)
    assert shown.count("<td>clearly better off</td>") == sum(beta >= 0.1 for beta in betas)
