"""The server's state on disk, after each of the last two rounds: safetensors, nothing that executes.

Each is sealed with a checksum. One that does not add up is put aside and the one before is used: it
costs a round that is played again to the same numbers.

`write_sealed` and `newest_whole` keep any state; `save_checkpoint` and `load_checkpoint` keep a RunState. The Flower
detector keeps its own state with the first two (flower/recorder.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, final

from torch import Tensor

from lindt.errors import UserError
from lindt.protocols import Buffers, RecoveryState
from lindt.runs.files import remove, write_whole
from lindt.runs.sealed import seal, unseal
from lindt.server.federation import RunState

KEPT: Final = 2
FORMAT: Final = 2  # of a checkpoint; 1 had no checksum
T = TypeVar("T")
PrivateRounds = dict[int, int]  # the round of each client's newest v_i


def save_checkpoint(folder: Path, state: RunState, private: PrivateRounds | None = None) -> None:
    """Write the state and the names of the v_i it goes with; drop all but the last two."""
    about: dict[str, Any] = {"recovery": recovery_table(state.recovery), "private": sorted((private or {}).items())}
    about |= {} if state.secret is None else {"secret": state.secret}
    tensors = {"w": state.w, "floats": state.buffers.floats_F, "counts": state.buffers.counts_I}
    write_sealed(folder, state.run, state.round, tensors, about)


def write_sealed(folder: Path, run: str, round: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a state of `tensors` and of JSON values, sealed, as the one after `round`; drop all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    words = json.dumps({"format": FORMAT, "run": run, "round": round, **about}, sort_keys=True, allow_nan=False)
    write_whole(path_of(folder, round), seal(tensors, {"about": words}))
    for old in rounds_in(folder)[:-KEPT]:
        remove(path_of(folder, old))


@final
@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint, the v_i it goes with, and the newer ones that are damaged, each with what is wrong."""

    state: RunState
    private: PrivateRounds
    damaged: dict[Path, str]


class UnreadableError(UserError):
    """A checkpoint that is whole but not ours to read: an older one would be no better."""


def load_checkpoint(folder: Path, run: str) -> LoadedCheckpoint | None:
    """The newest that is whole; None before the first round has ended. Where none is whole, it says so."""
    newest, damaged = newest_whole(folder, run, _run_state)
    if newest is None:
        if damaged:
            raise none_is_whole(damaged)
        return None
    return LoadedCheckpoint(*newest, damaged)


Damaged = dict[Path, str]  # checkpoints that cannot be used, each with what is wrong


def newest_whole(
    folder: Path, run: str, read: Callable[[dict[str, Tensor], dict[str, Any]], T]
) -> tuple[T | None, Damaged]:
    """What `read` makes of the newest checkpoint that is whole, if there is one, and the newer ones that are damaged.

    `read` is given the tensors and the JSON values. Where it raises ValueError, TypeError or KeyError, that
    checkpoint counts as damaged.
    """
    damaged: Damaged = {}
    for round in reversed(rounds_in(folder)):
        path = path_of(folder, round)
        try:
            tensors, words = unseal(path.read_bytes())
            about = json.loads(words["about"])
            if about["format"] != FORMAT:
                raise UnreadableError(
                    f"{path}: written in format {about['format']}, not {FORMAT}; use the lindt that wrote it"
                )
            if about["run"] != run or about["round"] != round:
                raise UnreadableError(f"{path} belongs to another run or round; start the run anew in another folder")
            return read(tensors, about), damaged
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
            damaged[path] = f"{path} is damaged ({error})"
    return None, damaged


def none_is_whole(damaged: Damaged) -> UserError:
    return UserError(f"{next(iter(damaged.values()))}, and no older one is whole; start the run anew")


def put_aside(damaged: Damaged, round: int) -> list[str]:
    """Rename damaged checkpoints so that no later run reads them; what to tell the user. `round` is the one used."""
    said = []
    for path, wrong in damaged.items():
        path.rename(path.with_suffix(".damaged"))
        said.append(f"{wrong}; it is put aside, and the run goes on from round {round}")
    return said


def _run_state(tensors: dict[str, Tensor], about: dict[str, Any]) -> tuple[RunState, PrivateRounds]:
    w, floats, counts = (tensors[name] for name in ("w", "floats", "counts"))
    recovery, private = (
        recovery_from(about["recovery"]),
        {natural_number(i): natural_number(r) for i, r in about["private"]},
    )
    secret = None if "secret" not in about else natural_number(about["secret"])
    return RunState(about["run"], about["round"], w, Buffers(floats, counts), recovery, secret), private


def recovery_table(state: RecoveryState) -> dict[str, Any]:
    """A RecoveryState as JSON values."""
    return asdict(state) | {"treated": sorted(state.treated)}


def recovery_from(found: dict[str, Any]) -> RecoveryState:
    counts = {name: natural_number(found[name]) for name in ("count", "quiet", "detections")}
    if type(found["on"]) is not bool:
        raise ValueError("recovery.on is not a boolean")
    return RecoveryState(on=found["on"], treated=frozenset(natural_number(i) for i in found["treated"]), **counts)


def natural_number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def rounds_in(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, in order."""
    names = [path.stem.removeprefix("round-") for path in folder.glob("round-*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}.safetensors"
