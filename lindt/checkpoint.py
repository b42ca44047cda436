"""The server's state on disk, after each of the last two rounds: safetensors, nothing that executes.

Each is sealed with a checksum. One that does not add up is put aside and the one before is used: it
costs a round that is played again to the same numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from lindt.disk import remove, write_whole
from lindt.errors import UserError
from lindt.federation import RunState
from lindt.recovery import RecoveryState
from lindt.sealed import seal, unseal
from lindt.weights import Buffers

KEPT: Final = 2
FORMAT: Final = 2  # of a checkpoint; 1 had no checksum

Kept = dict[int, int]  # the round of each client's newest v_i


def save_checkpoint(folder: Path, state: RunState, private: Kept | None = None) -> None:
    """Write the state and the names of the v_i it goes with; drop all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    recovery = asdict(state.recovery) | {"treated": sorted(state.recovery.treated)}
    about = {"format": FORMAT, "run": state.run, "round": state.round, "recovery": recovery}
    about |= {"private": sorted((private or {}).items())}
    about |= {} if state.secret is None else {"secret": state.secret}
    tensors = {"w": state.w, "floats": state.buffers.floats_F, "counts": state.buffers.counts_I}
    write_whole(path_of(folder, state.round), seal(tensors, {"about": json.dumps(about, sort_keys=True)}))
    for old in rounds_in(folder)[:-KEPT]:
        remove(path_of(folder, old))


@final
@dataclass(frozen=True)
class Loaded:
    """A checkpoint, the v_i it goes with, and the newer ones that are damaged, each with what is wrong."""

    state: RunState
    private: Kept
    damaged: dict[Path, str]


class UnreadableError(UserError):
    """A checkpoint that is whole but not ours to read: an older one would be no better."""


def load_checkpoint(folder: Path, run: str) -> Loaded | None:
    """The newest that is whole; None before the first round has ended. Where none is whole, it says so."""
    damaged: dict[Path, str] = {}
    for round in reversed(rounds_in(folder)):
        try:
            state, private = _read(path_of(folder, round), run, round)
        except DamagedError as error:
            damaged[path_of(folder, round)] = str(error)
        else:
            return Loaded(state, private, damaged)
    if damaged:
        raise UserError(f"{next(iter(damaged.values()))}, and no older one is whole; start the run anew")
    return None


class DamagedError(Exception):
    """What is wrong with a checkpoint's bytes."""


def _read(path: Path, run: str, round: int) -> tuple[RunState, Kept]:
    try:
        tensors, words = unseal(path.read_bytes())
        about = json.loads(words["about"])
        if about["format"] != FORMAT:
            raise UnreadableError(
                f"{path}: written in format {about['format']}, not {FORMAT}; use the lindt that wrote it"
            )
        if about["run"] != run or about["round"] != round:
            raise UnreadableError(f"{path} belongs to another run or round; start the run anew in another folder")
        w, floats, counts = (tensors[name] for name in ("w", "floats", "counts"))
        recovery, private = _recovery(about["recovery"]), {whole(i): whole(r) for i, r in about["private"]}
        secret = None if "secret" not in about else whole(about["secret"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise DamagedError(f"{path} is damaged ({error})") from None
    return RunState(run, round, w, Buffers(floats, counts), recovery, secret), private


def _recovery(found: dict[str, Any]) -> RecoveryState:
    counts = {name: whole(found[name]) for name in ("count", "quiet", "detections")}
    if type(found["on"]) is not bool:
        raise ValueError("its flag is none")
    return RecoveryState(on=found["on"], treated=frozenset(whole(i) for i in found["treated"]), **counts)


def whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def rounds_in(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, in order."""
    names = [path.stem.removeprefix("round-") for path in folder.glob("round-*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}.safetensors"
