"""The server's state on disk: a killed SuperLink costs at most one round.

    checkpoint/arrays-000012.safetensors   w after round 12, byte for byte, and what the strategy remembers
    checkpoint/state-000012.json           round, count, flag, sampler; written last, it makes the two valid

The last two are kept. Nothing in them is executed when they are read.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from safetensors import SafetensorError
from safetensors.numpy import load, save

from lindt.disk import write_whole
from lindt.errors import UserError
from lindt.flower.taps import chain
from lindt.recovery import RecoveryState

KEPT = 2
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


def save_arrays(folder: Path, saved: Saved) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    order = []
    for index, (name, array) in enumerate(saved.arrays.items()):
        order.append([name, array.dtype, list(array.shape), array.stype])
        tensors[f"array-{index}"] = np.frombuffer(array.data, dtype=np.uint8)
    tensors |= {f"memory-{name}": np.ascontiguousarray(value) for name, value in saved.memory.items()}
    write_whole(_arrays(folder, saved.round), save(tensors, {"order": json.dumps(order)}))


def save_state(folder: Path, saved: Saved) -> None:
    recovery = asdict(saved.recovery) | {"treated": sorted(saved.recovery.treated)}
    state = {
        "round": saved.round,
        "recovery": recovery,
        "nodes": [str(node) for node in saved.nodes],  # 64 bits: more than JSON's numbers hold everywhere
        "line": saved.line,
        "sampler": saved.sampler,
    }
    write_whole(_state(folder, saved.round), json.dumps(state, allow_nan=False).encode())
    for old in sorted(_rounds(folder))[:-KEPT]:
        _state(folder, old).unlink()
        _arrays(folder, old).unlink(missing_ok=True)


def load_newest(folder: Path) -> Saved | None:
    rounds = sorted(_rounds(folder))
    if not rounds:
        return None
    path = _state(folder, rounds[-1])
    try:
        state = json.loads(path.read_bytes())
        blob = _arrays(folder, rounds[-1]).read_bytes()
        tensors = load(blob)
        head = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        arrays = ArrayRecord()
        for index, (name, dtype, shape, stype) in enumerate(json.loads(head["__metadata__"]["order"])):
            arrays[name] = Array(dtype, tuple(shape), stype, tensors[f"array-{index}"].tobytes())
        memory = {n.removeprefix("memory-"): t for n, t in tensors.items() if n.startswith("memory-")}
        recovery = RecoveryState(**state["recovery"] | {"treated": frozenset(state["recovery"]["treated"])})
        version, position, gauss = state["sampler"]
        sampler = (version, tuple(position), gauss)
        random.Random().setstate(sampler)  # whether it is one
        nodes = [int(node) for node in state["nodes"]]
        return Saved(int(state["round"]), arrays, memory, recovery, nodes, dict(state["line"]), sampler)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it to go on from the one before") from None


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


def _rounds(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("state-") for path in folder.glob("state-*.json")]
    return [int(name) for name in names if name.isdigit()]
