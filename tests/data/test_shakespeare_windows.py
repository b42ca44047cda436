"""Windows of text: equal to naive slicing, never copied, split as LEAF splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lindt.data.examples import Rows, pool
from lindt.data.shakespeare import ALPHABET, CHARACTER_NAMES, encode, window_pools
from lindt.data.sources import Pools, Text
from lindt.errors import PlanError

WORDS = ["to be, or not to be", "Mark me.", "aye"]


def pools_of(words: list[str], how: Text, test_share: float = 0.1, seed: int = 0) -> Pools:
    texts = [encode(word) for word in words]
    return window_pools(np.concatenate(texts), np.cumsum([len(text) for text in texts]), words, how, test_share, seed)


def spelled(codes: torch.Tensor) -> str:
    return "".join(ALPHABET[code] for code in codes.tolist())


def test_the_alphabet_is_leafs() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == len(CHARACTER_NAMES) == 80
    assert (ALPHABET[0], ALPHABET[1], ALPHABET[-1]) == ("\n", " ", "}")
    assert ALPHABET.index("A") == 25


def test_line_ends_and_strange_characters_become_single_spaces() -> None:
    assert spelled(torch.from_numpy(encode("  Ham\n\n_let_ @@@ \tx "))) == "Ham let x"


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("split", ["blocked", "shuffled"])
def test_samples_are_naive_slices_of_one_role(split: str, stride: int) -> None:
    pools = pools_of(WORDS, Text(window=4, stride=stride, split=split))  # type: ignore[arg-type]
    assert pools.roles is not None
    data = Rows(pools.x, pools.y, torch.cat([pools.train, pools.test]), pools.prepare)
    x, y = data.take(torch.arange(len(data)))
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    found = {
        (int(role), spelled(window), ALPHABET[label])
        for role, window, label in zip(pools.roles[data.rows], x, y.tolist(), strict=True)
    }
    wanted = {
        (role, word[i : i + 4], word[i + 4]) for role, word in enumerate(WORDS) for i in range(0, len(word) - 4, stride)
    }
    # Blocked drops what straddles a cut; nothing else is missing, and nothing reaches into another role.
    assert found <= wanted
    assert split == "blocked" or found == wanted
    assert torch.equal(data.labels, y)


def test_the_cut_is_leafs() -> None:
    """1000 windows: the first 900 to train on, the next 79 dropped, the last 21 to test on."""
    words = ["x" * 1080]  # 1000 windows
    pools = pools_of(words, Text())
    assert pools.train.tolist() == list(range(900))
    assert pools.test.tolist() == list(range(979, 1000))
    last_train_x = range(899, 899 + 80)
    assert pools.test[0] == last_train_x.stop
    shuffled = pools_of(words, Text(split="shuffled"))
    assert (len(shuffled.train), len(shuffled.test)) == (900, 100)
    assert sorted([*shuffled.train.tolist(), *shuffled.test.tolist()]) == list(range(1000))
    assert shuffled.test.tolist() != list(range(900, 1000))
    strided = pools_of(words, Text(stride=10))  # 100 windows, at 0, 10, ... 990
    assert strided.train.tolist() == list(range(0, 900, 10))
    assert strided.test.tolist() == [970, 980, 990]  # the last training x ends before 970


def test_the_seed_decides_only_what_is_shuffled() -> None:
    for split, same in (("blocked", True), ("shuffled", False)):
        one, other = (pools_of(["abc" * 40], Text(window=5, split=split), seed=seed) for seed in (0, 1))  # type: ignore[arg-type]
        assert torch.equal(one.test, other.test) == same


def test_no_window_is_copied() -> None:
    text = np.frombuffer(b"\x01\x02" * 50_000, dtype=np.uint8).copy()
    pools = window_pools(text, np.array([100_000]), ["one"], Text(), 0.1, 0)
    assert pools.x.shape == (99_921, 80)
    for tensor in (pools.x, pools.y):
        assert tensor.untyped_storage().nbytes() == 100_000
        assert tensor.untyped_storage().data_ptr() == text.ctypes.data
    parts = [Rows(pools.x, pools.y, rows, pools.prepare) for rows in pools.train.split(30_000)]
    union = pool([*parts])
    assert isinstance(union, Rows)
    assert union.x.untyped_storage().data_ptr() == text.ctypes.data
    batch, _ = parts[1].take(torch.arange(50))
    assert batch.untyped_storage().nbytes() == 50 * 80 * 8


@pytest.mark.parametrize(("field", "value"), [("window", 0), ("window", 10_001), ("stride", 0)])
def test_what_cannot_be_is_refused(field: str, value: int) -> None:
    with pytest.raises(PlanError, match=f"{field} = {value}"):
        Text(**{field: value})  # type: ignore[arg-type]
