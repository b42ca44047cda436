"""The page in a real browser: Debian's chromium, driven by Playwright. Live on a run that goes on, and from disk."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from folders import (
    about,
    decision,
    detection,
    gain_plan,
    helps,
    hurts,
    line,
    mended,
    plan,
    scores,
    too_early,
    undecided,
    write_run,
)

from lindt.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

pytestmark = pytest.mark.slow
WAIT = 120_000  # ms: the machine may be busy
ROUNDS = 120
SHORT = ["--rounds", str(ROUNDS), "--engine", "inprocess"]
BY_DELTA = ("detection=delta", "method=runtime", "method.recovery.patience=4")
for field in ("alone.epochs=3", *BY_DELTA, "scoring.every=4", "scoring.last=2"):
    SHORT += ["--set", field]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if found is None and not os.environ.get("LINDT_BROWSER_REQUIRED"):
        pytest.skip("chromium is not installed: apt-get install chromium")
    assert found is not None, "chromium is not installed"
    with sync_playwright() as play:
        # Without a sandbox: chromium refuses one to root, which CI is; it opens our own pages only.
        opened = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


class Tab:
    """A page that keeps what must not happen: console errors, dialogs, requests to elsewhere."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.page: Page = browser.new_page(**{"viewport": {"width": 1200, "height": 900}} | options)
        self.page.set_default_timeout(WAIT)
        expect.set_options(timeout=WAIT)
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.add(request.url))

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.asked if not url.startswith("data:")}

    def points(self) -> int:
        return int(self.page.locator(".chart").first.get_attribute("data-points") or 0)


def lindt(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    settings = os.environ | {"LINDT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "lindt.cli", *arguments]
    return subprocess.Popen(command, cwd=folder, env=settings, stdout=subprocess.PIPE, text=True)


@contextmanager
def going(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    with lindt(*arguments, folder=folder) as run:
        try:
            yield run
        finally:
            run.kill()  # one that is held would be waited for without end


def output(*arguments: str, folder: Path) -> str:
    with lindt(*arguments, folder=folder) as done:
        said = done.communicate(timeout=120)[0]
    assert done.returncode == 0
    return said


@contextmanager
def watching(folder: Path) -> Iterator[str]:
    with lindt("watch", "runs", "--port", "0", folder=folder) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
            assert found
            yield found[0]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0


def test_a_run_is_followed_live(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs" / "before", mended())
    with watching(tmp_path) as address:
        tab = Tab(browser)
        page = tab.page
        page.goto(address)
        expect(page.get_by_role("button", name="before")).to_be_visible()
        with going("run", "digits-nfl", *SHORT, "--out", "runs/live", folder=tmp_path) as running:
            page.get_by_role("button", name="live", exact=True).click()  # it appears by itself
            page.evaluate("window.notReloaded = true")
            expect(page.locator(".events .detected")).to_contain_text("NFL suspected: Delta was above")
            running.send_signal(signal.SIGSTOP)  # held while it is looked at: it goes on, but plays nothing
            expect(page.locator(".chip").first).to_have_text("running")
            expect(page.locator(".events .on")).to_contain_text("recovery on")
            expect(page.locator("h1")).to_contain_text("Suspected by Delta since round 5")
            expect(page.get_by_text("so far no guarantee: the noise comes from torch's generator")).to_be_visible()
            early = tab.points()
            running.send_signal(signal.SIGCONT)
            expect(page.locator(".chip").first).to_have_text("ended")
            running.communicate(timeout=60)
        assert running.returncode == 0
        assert 5 <= early < tab.points() == ROUNDS
        assert page.evaluate("window.notReloaded") is True
        said = json.loads(output("show", "runs/live", "--json", folder=tmp_path))["verdict"]
        assert said.startswith("Suspected by Delta since round 5")
        clauses = [page.locator("h1").inner_text(), *page.locator(".clauses li").all_inner_texts()]
        assert "; ".join(clauses) == said.replace(" -", " \u2212").replace(" +- ", "\xa0\xb1\xa0")  # as in the terminal

        page.locator("g.bar").first.click()
        client = page.locator("g.bar").first.get_attribute("data-client")
        expect(page.locator(".followed h3")).to_have_text(f"Client {client}")
        expect(page.locator(".followed .chart")).to_have_attribute("data-points", str(ROUNDS))

        page.get_by_role("link", name="All runs").click()
        page.get_by_label("Compare before").check()
        page.get_by_label("Compare live").check()
        page.get_by_role("button", name="Compare 2 runs").click()
        expect(page.get_by_role("heading", name="2 runs compared")).to_be_visible()
        expect(page.locator(".compare tbody tr")).to_have_count(2)
        page.get_by_label("Delta").check()
        expect(page.locator(".compare .chart")).to_have_attribute("data-points", str(ROUNDS))
        assert tab.wrong == []
        assert tab.hosts() == {urlsplit(address).netloc}
        page.close()


def test_a_report_from_disk(browser: Browser, tmp_path: Path) -> None:
    for seed in range(3):
        shifted = [one | {"delta": one["delta"] + seed / 100} for one in mended()]
        write_run(tmp_path / "runs" / f"s{seed}", shifted, the_plan=plan(seed=seed))
    other = plan(method=plan()["method"] | {"adaptation": {"kind": "global_only"}})
    write_run(tmp_path / "runs" / "avg", mended(), the_plan=other)
    output("report", "runs", "-o", "report.html", folder=tmp_path)
    (tmp_path / "away").mkdir()
    moved = shutil.move(tmp_path / "report.html", tmp_path / "away" / "report.html")

    tab = Tab(browser)
    page = tab.page
    page.goto(f"file://{moved}")
    expect(page.get_by_role("heading", name="4 runs compared")).to_be_visible()
    rows = page.locator(".compare tbody tr")
    expect(rows).to_have_count(2)  # three seeds are one row
    expect(rows.filter(has_text="LINDT")).to_contain_text("+10.7")
    expect(page.get_by_text("its band goes from the lowest")).to_be_visible()
    page.get_by_role("link", name="s1").click()
    expect(page.locator("h1")).to_contain_text("Suspected by Delta since round 3")
    expect(page.locator(".headline")).to_contain_text("Better than alone now")
    sections = page.locator("section.block h2").all_inner_texts()
    assert sections == [
        "Delta against the detector's epsilon", "Accuracy", "Gain of each client", "Clients that answered",
        "Scores and gradients at the attach points", "Classes of each client", "Privacy budget spent", "Attack success",
        "Repeat this run",
    ]  # fmt: skip
    expect(page.get_by_text("lindt run plan.toml --out runs/again")).to_be_visible()
    assert tab.wrong == []
    assert tab.asked == {f"file://{moved}"} | {url for url in tab.asked if url.startswith("data:")}
    page.close()


@pytest.mark.parametrize(
    ("lines", "tone", "colour", "marks"),
    [
        (too_early(), "waiting", "ink-soft", 0),
        (undecided(), "unknown", "ink-soft", 1),
        (helps(), "helps", "good", 2),
        (hurts(), "hurts", "harm", 3),
        (hurts(recovering=True), "mended", "good", 6),
    ],
)
def test_the_four_states_and_their_colours(
    browser: Browser, tmp_path: Path, lines: list[dict[str, Any]], tone: str, colour: str, marks: int
) -> None:
    write_report([write_run(tmp_path / "run", lines, the_plan=gain_plan())], tmp_path / "report.html")
    for scheme, width in (("light", 1200), ("dark", 380)):
        tab = Tab(browser, color_scheme=scheme, viewport={"width": width, "height": 900})
        page = tab.page
        page.goto(f"file://{tmp_path / 'report.html'}")
        expect(page.locator(f".verdict.{tone} h1")).to_be_visible()
        expect(page.get_by_role("heading", name="Gain on validation data", exact=True)).to_be_visible()
        painted = "getComputedStyle(document.querySelector('.verdict')).borderLeftColor"
        named = (
            "(() => { const one = document.createElement('i'); one.style.color = 'var(--" + colour + ")'; "
            "document.body.append(one); return getComputedStyle(one).color; })()"
        )
        assert page.evaluate(painted) == page.evaluate(named)
        expect(page.locator(".events").first.locator("li")).to_have_count(marks)
        assert page.locator(".chart").first.get_attribute("data-points") == str(len(lines))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.wrong == []
        page.close()


@pytest.fixture
def report(tmp_path: Path) -> str:
    write_run(tmp_path / "run", mended())
    output("report", "run", "-o", "report.html", folder=tmp_path)
    return f"file://{tmp_path / 'report.html'}"


def test_the_keyboard_is_enough(browser: Browser, report: str) -> None:
    tab = Tab(browser)
    page = tab.page
    page.goto(report)
    chart = page.locator(".plot").first
    chart.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#spoken")).to_have_text("round 9: Delta 0.05")
    expect(page.locator(".legend .when").first).to_have_text("round 9")
    page.keyboard.press("Home")
    expect(page.locator("#spoken")).to_have_text("round 1: Delta 0.2")
    page.locator("g.bar[tabindex='0']").focus()
    expect(page.locator(".gain-chart .readout")).to_contain_text("Client 0: gain +2.0, −30.0 in round 3 (82.0 against")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator(".followed")).to_contain_text("Client 1")
    expect(page.locator(".followed")).to_contain_text("Benign, 40 training and 50 test samples")
    expect(page.locator(".followed")).to_contain_text(
        "asked in 10 rounds and answered in 10, 7 of them with recovery on"
    )
    page.locator(".grid canvas").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".grid .readout").first).to_have_text(re.compile("^Round 1, client 0: answered"))
    slider = page.get_by_label("Scored round")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("output")).to_have_text("round 3")
    expect(page.locator("g.bar.worse.clear")).to_have_count(2)
    assert tab.wrong == []
    page.close()


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_in_light_and_dark(browser: Browser, report: str, width: int, scheme: str) -> None:
    tab = Tab(browser, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = tab.page
    page.goto(report)
    expect(page.locator("h1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 27)"}[scheme]
    other = {"light": "dark", "dark": "light"}[scheme]
    for _ in range(3):
        if f"Colours: {other}" in page.locator("header").inner_text():
            break
        page.get_by_role("button", name="Colours").click()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != ground
    assert tab.wrong == []
    page.close()


# Every pair of labels in a chart that meet, and every line of a mark that goes through a label.
MEETING = """() => [...document.querySelectorAll(".chart")].flatMap((chart) => {
  const boxes = (what) => [...chart.querySelectorAll(`.marks ${what}`)].map((one) => ({
    text: one.textContent || `line ${one.dataset.round}`, ...one.getBoundingClientRect().toJSON(),
  }));
  const labels = boxes("span");
  const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const edge = chart.getBoundingClientRect();
  const top = chart.querySelector(".u-over")?.getBoundingClientRect().top ?? Infinity;
  return [
    ...labels.flatMap((a, i) => labels.slice(i + 1).filter((b) => meets(a, b)).map((b) => `${a.text} on ${b.text}`)),
    ...labels.flatMap((a) => boxes("i").filter((b) => meets(a, b)).map((b) => `${b.text} through ${a.text}`)),
    ...labels.filter((a) => a.left < edge.left || a.right > edge.right).map((a) => `${a.text} is cut`),
    ...labels.filter((a) => a.bottom > top - 6).map((a) => `${a.text} on the highest number of the axis`),
  ];
})"""


def crowded(rounds: int, at: list[int]) -> list[dict[str, Any]]:
    """A run with eight events in the given rounds: the test begins, warning, recovery on, hurts, undecided, off ..."""
    begins, warning, on, hurt, again, off, better, last = at
    found = []
    for r in range(1, rounds + 1):
        changes = {begins: "undecided", hurt: "hurts", again: "undecided", better: "helps", last: "undecided"}
        state = next((changes[n] for n in sorted(changes, reverse=True) if n <= r), "too early")
        told = detection(decision(state, -0.1 + 0.002 * r), warning=warning if r >= warning else None)
        found.append(
            line(r, detection=told, recovering=on <= r <= off, flag=on - 1 <= r < off, scores=scores([0.1, 0.2]))
        )
    return found


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_label_of_a_mark_meets_another_or_a_line(browser: Browser, tmp_path: Path, width: int) -> None:
    apart = {
        "middle": crowded(60, [23, 24, 25, 26, 27, 28, 29, 30]),
        "end": crowded(60, [53, 54, 55, 56, 57, 58, 59, 60]),
        "start": crowded(60, [2, 3, 4, 5, 6, 7, 8, 9]),
        "spread": crowded(500, [20, 25, 26, 100, 250, 251, 490, 500]),
        "delta": mended(),
    }
    for name, lines in apart.items():
        the_plan = plan() if name == "delta" else gain_plan(rounds=len(lines))
        write_report([write_run(tmp_path / name, lines, the_plan=the_plan)], tmp_path / f"{name}.html")
        tab = Tab(browser, viewport={"width": width, "height": 900})
        tab.page.goto(f"file://{tmp_path / name}.html")
        expect(tab.page.locator(".marks span").first).to_be_visible()
        assert tab.page.evaluate(MEETING) == []
        shown = tab.page.locator(".chart").first.locator(".marks span").all_inner_texts()
        assert "recovery on" in " ".join(shown)
        assert len(shown) >= {"delta": 2, "middle": 8}.get(name, 6)  # at an edge there is less room
        assert tab.wrong == []
        tab.page.close()


def inside(page: Page, cell: Any, height: int | None = None) -> None:
    box = None
    for _ in range(100):  # a page that is followed live may replace the element just then
        if (box := cell.bounding_box()) is not None:
            break
        page.wait_for_timeout(100)
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    assert height is None or box["y"] + box["height"] <= height


def test_gain_and_clearly_worse_are_seen_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    """In the list, in a comparison, and on the first screen of a run, without scrolling sideways."""
    write_run(tmp_path / "runs" / "hurt", hurts(), the_plan=gain_plan())
    write_run(tmp_path / "runs" / "mended", mended())
    with watching(tmp_path) as address:
        tab = Tab(browser, viewport={"width": 390, "height": 844})
        page = tab.page
        page.goto(address)
        row = page.locator("tbody tr", has_text="hurt").first
        for name, text in (("gain", "\u221215.0"), ("clearly worse", "2 of 3")):
            expect(row.locator(f"[data-name='{name}']")).to_have_text(text)
            inside(page, row.locator(f"[data-name='{name}']"))
        expect(row.locator("[data-name='changed']")).to_have_text(re.compile(r"^20\d\d-\d\d-\d\d \d\d:\d\d$"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.get_by_role("button", name="hurt", exact=True).click()
        for name, text in (("gain over training alone", "\u221215.0 points"), ("clearly worse off", "2 of 3")):
            tile = page.locator(".facts div", has_text=name).locator("dd").first
            expect(tile).to_have_text(text)
            inside(page, tile, 844)
        page.goto(f"{address}#run=hurt&run=mended")
        expect(page.locator(".compare tbody tr")).to_have_count(2)
        for name in ("gain", "clearly worse"):
            inside(page, page.locator(f".compare [data-name='{name}']").first)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.wrong == []
        page.close()


def test_sentence_tile_and_legend_have_the_same_digits(browser: Browser, tmp_path: Path) -> None:
    """A gain of 1/16 is 6.25 points: Python rounds it to 6.2, toFixed to 6.3. So is the gain on validation data."""
    told = detection(decision("helps", 0.0625, since=1, error=0.03125, samples=2800))
    notes = {"score/relu1": 1.0, "score/relu2": 0.9998, "gradient/head": 0.3}
    lines = [line(r, detection=told, scores=scores([0.0625, 0.0625], notes=notes)) for r in (1, 2)]
    write_report([write_run(tmp_path / "run", lines, the_plan=gain_plan(rounds=2))], tmp_path / "report.html")
    tab = Tab(browser)
    page = tab.page
    page.goto(f"file://{tmp_path / 'report.html'}")
    expect(page.locator("h1")).to_contain_text("the shared model is 6.2\xa0\xb1\xa06.2 points more accurate")
    expect(page.locator(".clauses")).to_contain_text("the clients are 6.2 points more accurate than alone")
    expect(page.locator(".facts div", has_text="gain over training alone")).to_contain_text("+6.2 points")
    expect(page.locator(".facts div", has_text="shared model against alone")).to_contain_text(
        "+6.2\xa0\xb1\xa06.2 points"
    )
    expect(page.locator(".legend").first).to_contain_text("the shared model +6.2")
    expect(page.locator("g.bar").first).to_have_attribute("aria-label", re.compile("Client 0: gain \\+6.2 "))
    expect(page.locator("h1")).to_contain_text("2,800 validation samples")
    expect(page.locator(".events").first).to_contain_text("on 2,800 validation samples of")
    expect(page.get_by_text("Only the head is adapted: every score is 1 to within 0.001")).to_be_visible()
    expect(page.get_by_text("no guarantee: no noise is added")).to_be_visible()
    expect(page.get_by_text("differential privacy's delta")).to_have_count(0)  # of no noise
    expect(page.get_by_text("The attacker is not counted.")).to_be_visible()
    assert tab.wrong == []
    page.close()


def test_a_layer_without_a_name_of_its_own_is_called_one(browser: Browser, tmp_path: Path) -> None:
    notes = {"score/1": 1.0, "score/3": 0.9, "gradient/1": 0.1, "gradient/head": 0.3}
    lines = [line(1, scores=scores([0.1, 0.1], notes=notes))]
    write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html")
    tab = Tab(browser)
    tab.page.goto(f"file://{tmp_path / 'report.html'}")
    expect(tab.page.get_by_text("At layer 1 the score is 1 to within 0.001")).to_be_visible()
    expect(tab.page.locator(".legend", has_text="layer 1 1.0000")).to_contain_text("layer 3 0.9000")
    expect(tab.page.locator(".legend", has_text="head 0.3")).to_contain_text("layer 1 0.1")
    assert tab.wrong == []
    tab.page.close()


@pytest.mark.parametrize(
    ("percent", "metric", "heading"),
    [(True, "accuracy", "Accuracy"), (True, "macro_f1", "Macro f1"), (False, "accuracy", "Score")],
    ids=["accuracy", "by name", "of a regression"],
)
def test_the_scores_are_headed_by_their_metric(
    percent: bool, metric: str, heading: str, browser: Browser, tmp_path: Path
) -> None:
    folder = write_run(
        tmp_path / "run", mended(), the_about=about(metric_in_percent=percent),
        the_plan=plan(scoring={"metric": metric}),
    )  # fmt: skip
    write_report([folder], tmp_path / "report.html")
    tab = Tab(browser)
    tab.page.goto(f"file://{tmp_path / 'report.html'}")
    expect(tab.page.locator("section.block h2").nth(1)).to_have_text(heading)
    expect(tab.page.get_by_role("img", name="Local, central and private scores over rounds")).to_be_visible()
    assert tab.wrong == []
    tab.page.close()


def test_names_are_text_and_every_state_has_words(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    lines = [
        line(1, refused=[{"client": 1, "reason": evil}], answered=[], scores=scores([0.1, -0.2], notes={evil: 0.5}))
    ]
    folder = write_run(
        tmp_path / "runs" / evil, lines, ended=False, the_plan=plan(name=evil),
        the_about=about(name=evil, class_names=[evil, "<script>alert(2)</script>"], versions={evil: evil}),
    )  # fmt: skip
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "half')
    (write_run(tmp_path / "runs" / "odd", mended()) / "run.json").write_text("{}")
    young = write_run(tmp_path / "runs" / "young", [], ended=False)
    with (young / "lock").open("w") as held, watching(tmp_path) as address:
        fcntl.flock(held, fcntl.LOCK_EX)
        tab = Tab(browser)
        page = tab.page
        page.goto(address)
        expect(page.locator("tbody tr", has_text="odd")).to_contain_text("unreadable")
        page.get_by_role("button", name="young").click()
        expect(page.locator("h1")).to_have_text(re.compile("^No round yet: first every client trains a model alone"))
        expect(page.get_by_text("No round is scored yet.")).to_be_visible()
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("button", name=evil).click()
        expect(page.locator(".chip").first).to_have_text("stopped before its end")
        expect(page.get_by_text("No process works on this run")).to_be_visible()
        expect(page.get_by_text("Note: 1 broken line of rounds.jsonl left out.")).to_be_visible()
        page.get_by_text("Refused updates").click()
        expect(page.get_by_text(f"the update of client 1 was refused: {evil}")).to_be_visible()
        assert page.locator("img").count() == 0
        page.goto(f"{address}#run=nowhere")
        page.reload()
        expect(page.get_by_text("This cannot be shown: there is no run 'nowhere' here")).to_be_visible()
        page.wait_for_timeout(300)
        assert [text for text in tab.wrong if "404" not in text] == []  # the browser itself tells of the missing run
        assert tab.hosts() == {urlsplit(address).netloc}
        page.close()


def test_an_empty_folder_says_so(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with watching(tmp_path) as address:
        tab = Tab(browser)
        tab.page.goto(address)
        expect(tab.page.get_by_text("No runs here yet. They appear by themselves")).to_be_visible()
        assert tab.wrong == []
        tab.page.close()
