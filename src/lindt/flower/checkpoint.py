"""The detector's state on disk: a killed SuperLink costs at most one round.

    checkpoint/round-000012.safetensors   all of `Saved` after round 12, sealed (src/lindt/runs/checkpoint.py)

The last two are kept. One that is damaged is put aside, and the one before is used. Nothing in them is executed when
they are read.

Earlier versions wrote two files a round without a checksum, state-000012.json and arrays-000012.safetensors. Those are
read where a folder has nothing newer, and removed as sealed ones take their place.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from lindt.errors import UserError
from lindt.flower.measure import chain
from lindt.protocols import RecoveryState
from lindt.runs.checkpoint import (
    KEPT,
    Damaged,
    natural_number,
    newest_whole,
    none_is_whole,
    recovery_from,
    recovery_table,
    write_sealed,
)
from lindt.runs.files import remove

MEMORY = ("m_t", "v_t", "momentum_vector", "clipping_norm")  # what Flower's strategies carry from round to round


@final
@dataclass(frozen=True)
class Saved:
    """All that a run needs to go on. `line` is the round's line of rounds.jsonl, which may not be written yet."""

    round: int
    arrays: ArrayRecord
    memory: dict[str, np.ndarray]
    recovery: RecoveryState
    nodes: list[int]  # a node's number is its place here
    line: dict[str, Any]
    sampler: Any  # Flower draws nodes with Python's own generator
    lines: int | None = None  # how many rounds.jsonl has with this one; None where it was not recorded


def save(folder: Path, run: str, saved: Saved) -> None:
    """Write the state after a round, or replace it where the round was saved before."""
    arrays = list(saved.arrays.items())
    tensors = {f"array-{i}": _tensor(np.frombuffer(a.data, np.uint8)) for i, (_, a) in enumerate(arrays)}
    tensors |= {f"memory-{name}": _tensor(value) for name, value in saved.memory.items()}
    about = {
        "arrays": [[name, array.dtype, list(array.shape), array.stype] for name, array in arrays],
        "recovery": recovery_table(saved.recovery),
        "nodes": [str(node) for node in saved.nodes],  # 64 bits: more than JSON's numbers hold everywhere
        "line": saved.line,
        "lines": saved.lines,
        "sampler": saved.sampler,
    }
    write_sealed(folder, run, saved.round, tensors, about)
    for old in _unsealed_rounds(folder):
        if old <= saved.round - KEPT:
            remove(_state(folder, old))
            _arrays(folder, old).unlink(missing_ok=True)


def load_newest(folder: Path, run: str) -> tuple[Saved | None, Damaged]:
    """The newest state that is whole, None before the first round, and the newer ones that are damaged."""
    saved, damaged = newest_whole(folder, run, _read)
    for round in [] if saved else sorted(_unsealed_rounds(folder), reverse=True):
        try:
            return _read_unsealed(folder, round), damaged
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            damaged[_state(folder, round)] = f"{_state(folder, round)} is damaged ({error})"
    if saved is None and damaged:
        raise none_is_whole(damaged)
    return saved, damaged


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, order="C"))  # a copy: a message's bytes are read-only


def _read(tensors: dict[str, Tensor], about: dict[str, Any]) -> Saved:
    values = {name: tensor.numpy() for name, tensor in tensors.items()}
    lines = None if about["lines"] is None else natural_number(about["lines"])
    return _saved(about["round"], values, about["arrays"], about, lines)


def _read_unsealed(folder: Path, round: int) -> Saved:
    """The form of earlier versions."""
    state = json.loads(_state(folder, round).read_bytes())
    blob = _arrays(folder, round).read_bytes()
    head = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return _saved(natural_number(state["round"]), load(blob), json.loads(head["__metadata__"]["order"]), state, None)


def _saved(round: int, values: dict[str, np.ndarray], order: Any, state: dict[str, Any], lines: int | None) -> Saved:
    arrays = ArrayRecord()
    for index, (name, dtype, shape, stype) in enumerate(order):
        arrays[name] = Array(dtype, tuple(shape), stype, values[f"array-{index}"].tobytes())
    memory = {name.removeprefix("memory-"): v for name, v in values.items() if name.startswith("memory-")}
    version, position, gauss = state["sampler"]
    sampler = (version, tuple(position), gauss)
    random.Random().setstate(sampler)  # raises where it is none
    nodes = [int(node) for node in state["nodes"]]
    return Saved(round, arrays, memory, recovery_from(state["recovery"]), nodes, dict(state["line"]), sampler, lines)


def check_fit(saved: ArrayRecord, initial: ArrayRecord) -> None:
    """Whether a checkpoint is of this model: a strategy may drop arrays, but not change their shapes."""
    shared = saved.keys() & initial.keys()
    if not shared or any(tuple(saved[name].shape) != tuple(initial[name].shape) for name in shared):
        raise UserError("initial_arrays: the checkpoint in `folder` is of another model; name another folder")


def remembered(strategy: Strategy) -> dict[str, np.ndarray]:
    """Moments, momentum and adaptive clipping, of each strategy in the chain, by place and name."""
    found: dict[str, np.ndarray] = {}
    for place, link in enumerate(chain(strategy)):
        for name in MEMORY:
            value = vars(link).get(name)
            if isinstance(value, dict):
                found |= {f"{place}/{name}/dict/{key}": np.asarray(item) for key, item in value.items()}
            elif isinstance(value, list):
                found |= {f"{place}/{name}/list/{key:06d}": np.asarray(item) for key, item in enumerate(value)}
            elif isinstance(value, float):
                found[f"{place}/{name}/number/"] = np.asarray(value, dtype=np.float64)
    return found


def remind(strategy: Strategy, memory: dict[str, np.ndarray]) -> None:
    """Give a new strategy what the one before it carried."""
    links = list(chain(strategy))
    gathered: dict[tuple[int, str, str], dict[str, np.ndarray]] = {}
    for key in sorted(memory):
        at, name, kind, rest = key.split("/", 3)
        gathered.setdefault((int(at), name, kind), {})[rest] = memory[key]
    for (place, name, kind), items in gathered.items():
        if place >= len(links) or name not in vars(links[place]):
            raise UserError(f"strategy: the checkpoint has {name} of another one; start with the same strategies")
        value: Any = float(items[""]) if kind == "number" else items if kind == "dict" else list(items.values())
        setattr(links[place], name, value)


def _state(folder: Path, round: int) -> Path:
    return folder / f"state-{round:06d}.json"


def _arrays(folder: Path, round: int) -> Path:
    return folder / f"arrays-{round:06d}.safetensors"


def _unsealed_rounds(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("state-") for path in folder.glob("state-*.json")]
    return [int(name) for name in names if name.isdecimal()]
