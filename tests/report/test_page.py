"""The report: one file, small, complete, and deaf to what its runs' names say."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, final

import pytest
from folders import about, line, mended, plan, scores, write_run

import lindt
from lindt.errors import UserError
from lindt.report.page import HOLE, empty_page, ids_of, page_with, script_hashes, write_report
from lindt.report.payload import (
    PrivacySpent,
    brief_number,
    budget_is_open,
    privacy_spent,
    privacy_spent_so_far,
    progress,
    whole_run,
)
from lindt.report.reading import read_run

NONE = PrivacySpent("no guarantee")


def embedded(page: str) -> list[dict[str, Any]]:
    text = page.partition(HOLE.partition("null")[0])[2].partition("</script>")[0]
    return json.loads(text)["runs"]  # type: ignore[no-any-return]


def test_a_report_holds_the_runs_and_the_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one", mended())
    write_report([folder], tmp_path / "report.html")
    (run,) = embedded((tmp_path / "report.html").read_text())
    assert run["verdict"]["sentence"].startswith(
        "Suspected by Delta since round 3; in that round the clients were 15.0"
    )
    assert (run["id"], run["state"], run["method"], run["planned"]) == ("one", "ended", "LINDT on detection", 10)
    assert run["rule"] == {"epsilon": 0.1, "patience": 2, "statistic": "delta", "counting": "cumulative"}
    third = run["rounds"][2]
    assert (third["delta"], third["count"], third["seconds"]) == (0.2, 3, 0.5)
    assert third["scores"]["betas"] == [-0.3, -0.2, 0.05]
    assert third["scores"]["clear"] == "110"
    assert run["clients"][3] == {
        "client": 3, "train": 40, "test": 50, "attacker": True, "labels": {"0": 30, "1": 10}, "name": "",
    }  # fmt: skip
    assert run["command"] == "lindt run plan.toml --out runs/again"
    assert str(tmp_path) not in (tmp_path / "report.html").read_text()  # no machine's paths


@final
class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_no_name_breaks_out_of_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028&lt;"
    lines = [line(1, refused=[{"client": 1, "reason": evil}], scores=scores([0.1], notes={evil: 1.0}))]
    names = about(name=evil, class_names=[evil, evil], versions={evil: evil}, task=evil)
    folder = write_run(tmp_path / "run", lines, the_about=names, the_plan=plan(name=evil))
    page = page_with([whole_run(read_run(folder), evil, NONE)])

    assert Elements(page).found == Elements(empty_page()).found
    assert embedded(page)[0]["id"] == evil  # whole, but as text
    assert "alert(1)</script>" not in page


def test_the_page_asks_nobody_for_anything() -> None:
    page = empty_page()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found
    script, style = script_hashes(page)
    for rule in ("default-src 'none'", f"script-src {script};", f"style-src {style};", "connect-src 'self'"):
        assert rule in found[1]
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", page.partition("<script>")[0])
    assert not re.findall(r"url\((?!data:)", page.partition("<style>")[2].partition("</style>")[0])
    assert "The MIT License (MIT)" in page
    assert "Leon Sorokin" in page


def test_500_rounds_and_100_clients_fit_in_2_mb(tmp_path: Path) -> None:
    """Every round scored, random digits everywhere: the worst case."""
    draw = random.Random(0)

    def numbers() -> dict[str, float]:
        names = ("w_div", "delta", "clean", "spread", "clipped", "noise_norm")
        return {name: draw.random() for name in names}

    def one(round: int) -> dict[str, Any]:
        found = scores([draw.uniform(-0.5, 0.5) for _ in range(100)])
        points = [f"{kind}/{name}" for kind in ("score", "gradient") for name in ("conv1", "conv2", "fc1", "fc2")]
        found |= {"attack_central": draw.random(), "notes": {name: draw.random() for name in points}}
        asked = draw.sample(range(100), 10)
        return line(round, asked=asked, answered=sorted(asked), scores=found, **numbers())

    clients = [
        {"client": i, "train": 450, "test": 100, "attacker": i < 20, "labels": {str(c): 45 for c in range(10)}}
        for i in range(100)
    ]
    lines = [one(r) for r in range(1, 501)]
    folder = write_run(tmp_path / "run", lines, the_about=about(clients=1) | {"clients": clients})
    write_report([folder], tmp_path / "report.html")
    assert 1_000_000 < (tmp_path / "report.html").stat().st_size < 2_000_000


def test_no_colour_of_text_is_too_pale() -> None:
    """WCAG's contrast of 4.5 to 1, in light and dark, against the page, a card and a shaded cell."""
    style = (Path(lindt.__file__).parent / "report" / "page" / "src" / "page.css").read_text()

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)) for block in re.split(r"\s color-scheme: ", style)[:3]
    ]
    assert themes[1] == themes[2]
    for theme in themes[:2]:
        for text in ("ink", "ink-soft", "local", "central", "harm", "good", "recover", "rule"):
            for ground in ("bg", "card", "cell"):
                low, high = sorted((luminance(theme[text]), luminance(theme[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_progress_is_what_is_new(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", mended()))
    assert [one["round"] for one in progress(run, "x", NONE, 8)["rounds"]] == [9, 10]
    assert whole_run(run, "x", NONE).items() >= progress(run, "x", NONE, 0).items()


def test_numbers_are_as_long_as_an_eye_can_tell() -> None:
    found = [brief_number(value, 4) for value in (0.123456, -2.0, 1e-9, None, 123456.0)]
    assert found == [0.1235, -2, 1e-9, None, 123500]


def test_runs_are_called_by_as_few_names_as_tell_them_apart() -> None:
    assert ids_of([Path("/a/b/c"), Path("/a/b/d")]) == ["c", "d"]
    assert ids_of([Path("/a/b/c"), Path("/a/x/c")]) == ["b/c", "x/c"]


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        write_report([tmp_path], tmp_path / "r.html")
    folder = write_run(tmp_path / "run", mended())
    with pytest.raises(UserError, match="there is no folder"):
        write_report([folder], tmp_path / "nowhere" / "r.html")


def test_the_budget_of_a_run_that_goes_on_is_that_of_its_rounds(tmp_path: Path) -> None:
    """By the same function as the summary at the end; here against the summary of a run of as many rounds."""
    from worlds import tiny

    from lindt.runs.play import run_plan

    list(run_plan(tiny(), tmp_path / "run"))
    ended = read_run(tmp_path / "run")
    assert not budget_is_open(ended)
    (tmp_path / "run" / "summary.json").unlink()
    going = read_run(tmp_path / "run")
    assert budget_is_open(going)
    assert privacy_spent(going).words == "not computed yet: the run has not ended"
    found = privacy_spent_so_far(going)
    assert found.epsilon == pytest.approx(ended.summary["privacy"]["epsilon"])  # type: ignore[index]
    assert found.words == f"so far {privacy_spent(ended).words}"
