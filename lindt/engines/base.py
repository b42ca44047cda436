"""An engine is a transport: it carries tasks to clients and brings their replies. Everything else is ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, final

from torch import Tensor

from lindt.metrics import ClientTally
from lindt.weights import Buffers

Kind = Literal["train", "evaluate", "private"]
CLOSED: Final = "the engine is closed; build another"


@final
@dataclass(frozen=True)
class Task:
    """What the server asks of one client. There is no field for v_i: it never travels.

    `run` keeps the v_i of different runs apart; `keep` is the round of the oldest checkpoint, up to which a
    client may forget what newer versions of v_i replace.
    """

    kind: Kind
    run: str
    client: int
    round: int
    w: Tensor
    buffers: Buffers
    recovering: bool  # Alg. 2, `flag`
    keep: int = 0


@final
@dataclass(frozen=True)
class Reply:
    """What comes back: w_i and n_i from training, a tally and the method's notes from evaluating."""

    client: int
    round: int
    size: int
    w: Tensor | None = None
    buffers: Buffers | None = None
    tally: ClientTally | None = None
    notes: dict[str, float] | None = None
    fault: str | None = None  # why there is nothing to take, where a client failed or could not be understood


class Engine(Protocol):
    def available(self) -> Sequence[int]: ...
    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        """Replies, as they come or in the order asked. Where clients are far away, one that fails sends none."""
        ...

    def forget_after(self, round: int) -> None:
        """Before a resumed run goes on: drop every v_i written after `round`."""
        ...


def check_tasks(tasks: Sequence[Task], clients: int) -> None:
    """Refuse tasks for clients that do not exist; a negative id would be a client counted from the end."""
    for task in tasks:
        if not 0 <= task.client < clients:
            raise ValueError(f"client {task.client} does not exist: the problem has clients 0 to {clients - 1}")
