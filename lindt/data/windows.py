"""Text as samples: the 80 characters of LEAF, one buffer of bytes, and a window for every place in it.

A sample is an offset. All windows together are one view of the buffer, in which the rows overlap; a batch is copied out
of it when it is taken. So a million windows of 80 characters take a million bytes, and 8 a window for the offsets.

Legend: L characters in the buffer, R roles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lindt.data.shares import IntArray
from lindt.data.sources import Pools, Text
from lindt.seeds import seed_for

# A character's class is its place here; 0, the line end, is what the attackers on text want (Appendix C.1).
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
CHARACTER_NAMES = tuple({"\n": "line end", " ": "space"}.get(character, character) for character in ALPHABET)
_CODES = {character: code for code, character in enumerate(ALPHABET)}


def encode(text: str) -> NDArray[np.uint8]:
    """Classes of characters; what is not in the alphabet becomes a space, and runs of spaces one."""
    known = " ".join("".join(c if c in _CODES and c != "\n" else " " for c in text).split())
    return np.array([_CODES[character] for character in known], dtype=np.uint8)


def window_pools(
    text_L: NDArray[np.uint8], ends_R: IntArray, names: Sequence[str], how: Text, test_share: float, seed: int
) -> Pools:
    """The samples of every role; role r's text ends before ends_R[r] and begins where the one before it ends.

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
    """A batch of windows as an embedding wants them."""
    return x.long()
