"""The picture of the allocation: what it says, and that it can be read."""

from __future__ import annotations

import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from lindt.cli import execution
from lindt.plan.file import resolve
from lindt.report.labels import ATTACKER, BENIGN, draw_labels, label_figure


def shown(texts: list[Text]) -> list[Text]:
    return [text for text in texts if text.get_text() and text.get_visible()]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    figure.draw_without_rendering()  # type: ignore[no-untyped-call,unused-ignore]
    pairs: list[tuple[str, str]] = []
    for axes in figure.axes:
        for texts in (shown(axes.get_xticklabels()), shown(axes.get_yticklabels())):
            pairs += [
                (here.get_text(), there.get_text())
                for here, there in pairwise(texts)
                if here.get_window_extent().overlaps(there.get_window_extent())
            ]
    return pairs


def test_colours_and_bars_are_the_counts() -> None:
    figure = label_figure(np.array([[3, 0], [1, 20]]), ["cat", "dog"], attackers=frozenset({1}))
    bars, heat = figure.axes[:2]
    assert [bar.get_height() for bar in bars.patches] == [3, 21]  # type: ignore[attr-defined]
    for bar, colour in zip(bars.patches, (BENIGN, ATTACKER), strict=True):
        assert to_hex(bar.get_facecolor()).upper() == colour
    assert heat.images[0].get_array().tolist() == [[3, 1], [None, 20]]  # type: ignore[union-attr]
    assert [text.get_text() for text in heat.get_yticklabels()] == ["cat", "dog"]
    assert [text.get_text() for text in heat.get_xticklabels()] == ["0", "1"]


@pytest.mark.parametrize("named", [False, True])
def test_any_number_of_clients_is_drawn(named: bool, tmp_path: Path) -> None:
    clients = 20_000
    counts_NC = np.random.default_rng(0).integers(0, 5, (clients, 3))
    roles = [f"role {i}" for i in range(clients)] if named else None
    figure = label_figure(counts_NC, roles=roles, attackers=frozenset(range(0, clients, 7)))
    assert overlapping(figure) == []
    labels = [text.get_text() for text in shown(figure.axes[1].get_xticklabels())]
    assert 5 <= len(labels) <= 100
    assert len(figure.axes[0].patches) == 0  # 20,000 bars would take most of a minute
    assert sum(len(lines.get_segments()) for lines in figure.axes[0].collections) == clients  # type: ignore[attr-defined]
    figure.savefig(tmp_path / "labels.png", dpi=150)


def test_attackers_are_marked_and_explained_only_if_there_are_any() -> None:
    counts_NC = np.ones((5, 3), dtype=np.int64)
    plain, marked = (label_figure(counts_NC, attackers=who).axes[0] for who in (frozenset(), frozenset({4, 1})))
    assert plain.get_legend() is None
    assert not plain.lines
    assert np.asarray(marked.lines[0].get_xdata()).tolist() == [1, 4]
    legend = marked.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["benign", "attacker"]


def test_axes_and_title_say_what_they_are() -> None:
    figure = label_figure(np.ones((4, 3), dtype=np.int64))
    bars, heat, colours = figure.axes
    assert figure.get_suptitle() == "Label distribution of 4 clients over 3 classes"
    assert (heat.get_xlabel(), heat.get_ylabel(), bars.get_ylabel()) == ("client", "class", "samples")
    assert colours.get_ylabel() == "samples (white: none)"


@pytest.mark.parametrize(("clients", "classes"), [(2, 2), (20, 10), (66, 80), (200, 10)])
@pytest.mark.parametrize("named", [False, True])
def test_no_two_tick_labels_overlap(clients: int, classes: int, named: bool) -> None:
    rng = np.random.default_rng(0)
    counts_NC = rng.poisson(rng.lognormal(3, 2, size=(clients, classes)))
    names = [f"a class {c}" for c in range(classes)] if named else None
    roles = [f"ROLE_OF_{i}" for i in range(clients)] if named else None
    figure = label_figure(counts_NC, names, roles, frozenset({0}))
    assert overlapping(figure) == []
    heat = figure.axes[1]
    assert min(float(text.get_fontsize()) for text in heat.get_xticklabels() + heat.get_yticklabels()) >= 6
    assert len(heat.get_xticks()) >= min(clients, 10)
    assert len(heat.get_yticks()) == classes, "every class is named"


def test_nobody_holding_anything_can_be_drawn(tmp_path: Path) -> None:
    draw_labels(np.zeros((2, 2), dtype=np.int64), tmp_path / "none.png")
    draw_labels(np.ones((2, 2), dtype=np.int64), str(tmp_path / "one.svg"))
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "one.svg").read_bytes()


def test_characters_are_shown_as_they_are() -> None:
    heat = label_figure(np.ones((2, 3), dtype=np.int64), ["\n", "$x$", "a"]).axes[1]
    assert [text.get_text() for text in heat.get_yticklabels()] == ["\\n", "$x$", "a"]
    assert not any(text.get_parse_math() for text in heat.get_yticklabels())


def test_names_must_match_the_counts() -> None:
    with pytest.raises(ValueError, match="2 roles and 2 class names for 2 clients and 3 classes; give one each"):
        label_figure(np.ones((2, 3), dtype=np.int64), ["a", "b"])


def test_neither_torch_nor_pyplot_is_imported() -> None:
    code = "import sys, lindt.report.labels; assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_table_of_many_clients_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MOST_ROWS", 3)
    said = io.StringIO()
    session = execution.CommandContext(Console(file=said, width=120))
    execution.describe_data(session, resolve("digits-nfl"), tmp_path / "labels.png")
    text = said.getvalue()
    assert "20 clients" in text
    assert "and 17 more clients; --json lists all" in text
    assert sum("attacker" in line or ":" in line for line in text.splitlines()) < 10
