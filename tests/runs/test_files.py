"""Files: a lock for one process at a time; sealed files come back as they were, and no damage goes unnoticed."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from lindt.errors import UserError, mendable
from lindt.runs import files
from lindt.runs.files import DTYPES, BrokenError, append_line, locked, seal, unseal, write_whole


def test_a_held_lock_is_refused_in_the_callers_words(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        locked(path, wait=0, busy="nobody"),
        pytest.raises(UserError, match=r"^it is taken$"),
        locked(path, wait=0.1, busy="it is taken"),
    ):
        raise AssertionError
    with locked(path, wait=0, busy="it is free again"):
        pass


def test_a_held_lock_is_waited_for(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", list[str]()
    holder = path.open("w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    timer = threading.Timer(0.2, lambda: (order.append("released"), holder.close()))
    timer.start()
    with locked(path, wait=math.inf, busy=""):
        order.append("taken")
    timer.join()
    assert order == ["released", "taken"]


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_file: object, _how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with (
        pytest.raises(UserError, match=r"cannot be locked .No locks available."),
        locked(tmp_path / "a", wait=9, busy=""),
    ):
        raise AssertionError


@pytest.mark.parametrize("write", [write_whole, append_line])
def test_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    def fsync(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # the system does not say where

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") as failed:
        write(tmp_path / "rounds.jsonl", b"line")
    assert mendable(failed.value) == f"{tmp_path / 'rounds.jsonl'}: No space left on device"


TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "n": torch.tensor([3, -1]),
    "none": torch.empty(0),
    "half": torch.ones(3, dtype=torch.bfloat16),
}
WORDS = {"about": '{"round": 3}', "more": "ä"}
SEALED = seal(TENSORS, WORDS)


def test_the_same_is_sealed_as_the_same_bytes() -> None:
    assert all(seal(TENSORS, dict(reversed(WORDS.items()))) == SEALED for _ in range(20))


def test_what_was_sealed_comes_back() -> None:
    tensors, words = unseal(SEALED)
    assert words == WORDS
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.tuples(st.sampled_from([getattr(torch, name) for name in DTYPES]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_file_says_what_the_librarys_own_writer_would(shapes: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in shapes.items() if name != "__metadata__"
    }
    ours, theirs = load(seal(tensors, {})), load(save(tensors))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (ours[name], tensor)))


def test_a_type_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(ValueError, match=r"^v: torch.complex128 cannot be written"):
        seal({"v": torch.ones(1, dtype=torch.complex128)}, {})


def test_tied_and_transposed_weights_are_kept_as_values() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    tensors, _ = unseal(seal({"a": w, "tied": w, "turned": w.t()}, {}))
    assert torch.equal(tensors["tied"], w)
    assert torch.equal(tensors["turned"], w.t())


def test_each_byte_counts() -> None:
    for position in range(len(SEALED)):
        for flipped in (0x01, 0x80, 0xFF):
            broken = bytearray(SEALED)
            broken[position] ^= flipped
            with pytest.raises(BrokenError, match=r".+"):
                unseal(bytes(broken))


def test_cut_anywhere_it_is_broken() -> None:
    for length in range(len(SEALED)):
        with pytest.raises(BrokenError):
            unseal(SEALED[:length])


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_broken_and_nothing_worse(content: bytes) -> None:
    with pytest.raises(BrokenError):
        unseal(content)


def test_a_seal_of_other_words_does_not_pass() -> None:
    assert SEALED.count(b": 3}") == 1  # of the round
    other = SEALED.replace(b": 3}", b": 4}")
    with pytest.raises(BrokenError, match="checksum"):
        unseal(other)
