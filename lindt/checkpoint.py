"""The server's state on disk, after each of the last two rounds: safetensors, nothing that executes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lindt.disk import write_whole
from lindt.errors import UserError
from lindt.federation import RunState
from lindt.recovery import RecoveryState
from lindt.weights import Buffers

KEPT = 2


Kept = dict[int, int]  # the round of each client's newest v_i


def save_checkpoint(folder: Path, state: RunState, private: Kept | None = None) -> None:
    """Write the state and the names of the v_i it goes with; drop all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    recovery = asdict(state.recovery) | {"treated": sorted(state.recovery.treated)}
    about = {"run": state.run, "round": state.round, "recovery": recovery, "private": sorted((private or {}).items())}
    about |= {} if state.secret is None else {"secret": state.secret}
    tensors = {"w": state.w, "floats": state.buffers.floats_F, "counts": state.buffers.counts_I}
    write_whole(_path(folder, state.round), save(tensors, {"about": json.dumps(about, sort_keys=True)}))
    kept = sorted(_rounds(folder))
    for old in kept[:-KEPT]:
        _path(folder, old).unlink()


def load_checkpoint(folder: Path, run: str) -> RunState | None:
    """The newest checkpoint, or None before the first round has ended."""
    rounds = sorted(_rounds(folder))
    if not rounds:
        return None
    path = _path(folder, rounds[-1])
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            w, floats, counts = (file.get_tensor(name) for name in ("w", "floats", "counts"))
        recovery = RecoveryState(**about["recovery"] | {"treated": frozenset(about["recovery"]["treated"])})
        if about["run"] != run or about["round"] != rounds[-1]:
            raise UserError(f"{path} belongs to another run or round; start the run anew in another folder")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it to go on from the one before") from None
    return RunState(run, about["round"], w, Buffers(floats, counts), recovery, about.get("secret"))


def private_names(folder: Path, round: int) -> Kept:
    """Which v_i a checkpoint goes with."""
    try:
        with safe_open(_path(folder, round), framework="pt") as file:
            return {int(i): int(r) for i, r in json.loads(file.metadata()["about"])["private"]}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{_path(folder, round)} is damaged ({error}); delete it to go on from the one before"
        ) from None


def _path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}.safetensors"


def _rounds(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("round-") for path in folder.glob("round-*.safetensors")]
    return [int(name) for name in names if name.isdigit()]
