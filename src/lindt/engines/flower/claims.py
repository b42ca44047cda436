"""Which node holds which client in a run on Flower: the server's map, kept in the run's folder as nodes.json.

A client belongs to the node that held it first, or to the node that the operator names (`--nodes FILE`). The claim of
another node is refused and recorded. Until the first task no node holds a client: if two nodes claim a client before
it, the client is given to neither, since the faster answer need not be the right one. A client still belongs to its
node while that node is away.

A node is recognised by its Flower id, which the SuperLink binds to the node's public key, or by a proof that it has the
key of its folder (identity.py): the id changes if keys are not registered, and with a new database of the SuperLink.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from lindt.errors import UserError
from lindt.runs.files import BrokenError, seal_table, unseal_table, write_whole
from lindt.runs.schema import NODES, NODES_FILE, fits

MOST_REFUSED: Final = 100  # nodes whose refused claims are kept


@final
@dataclass(frozen=True)
class Holder:
    """A client's node: Flower's id, and the public key whose possession the node has proven; "" without a proof."""

    node: int
    key: str

    def is_same(self, node: int, key: str) -> bool:
        return self.node == node or (key != "" and self.key == key)


@final
class Claims:
    """`holders`: the node of each client. `refused`: the refused claims by node. Without `path` nothing is saved."""

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        self._path, self._run = path, run
        self.holders: dict[int, Holder] = {}
        self.refused: dict[int, set[int]] = {}
        self.contested: dict[int, set[int]] = {}  # by client: the nodes that claim it, before the first task
        self._new: set[int] | None = set()  # clients claimed since the start; None once the claims are settled

    @classmethod
    def open(cls, folder: Path, run: str) -> Claims:
        """Load the claims of a run's folder. A damaged file is an error, and is not replaced by an empty one."""
        found = cls(folder / NODES_FILE, run)
        path = folder / NODES_FILE
        if not path.exists():
            return found
        try:
            table = unseal_table(path.read_bytes())
            if not fits(table, NODES) or table["run"] != run:
                raise BrokenError("it is of another run or version")
            holders = {one["client"]: Holder(int(one["node"]), one["key"]) for one in table["holders"]}
            found.refused = {int(one["node"]): set(one["clients"]) for one in table["refused"]}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be used ({error}); restore it, or delete it, and name the nodes with --nodes"
            ) from None
        found.holders = holders
        return found

    def claim(self, node: int, key: str, clients: frozenset[int]) -> frozenset[int]:
        """Of the clients that the node claims, those that it holds from now on. `key` is its proven public key."""
        before = dict(self.holders), {node: set(clients) for node, clients in self.refused.items()}
        granted = {i for i in clients if i not in self.holders or self.holders[i].is_same(node, key)}
        if self._new is not None:
            self._new |= granted - self.holders.keys()
            for i in (clients - granted) & self._new:
                self.contested.setdefault(i, {self.holders[i].node}).add(node)
        for i in granted:
            known = self.holders[i].key if i in self.holders else ""
            self.holders[i] = Holder(node, key or known)
        self._refuse(node, clients - granted)
        if (self.holders, self.refused) != before:
            self._save()
        return frozenset(granted)

    def settle(self) -> None:
        """Before the first task: a client that one node claims is held by it, a client that two nodes claim by none."""
        for client, nodes in self.contested.items():
            del self.holders[client]
            for node in sorted(nodes):
                self._refuse(node, {client})
        self._new = None
        self._save()

    def _refuse(self, node: int, clients: Set[int]) -> None:
        if clients and (node in self.refused or len(self.refused) < MOST_REFUSED):
            self.refused.setdefault(node, set()).update(clients)

    def name(self, listed: Mapping[int, int]) -> None:
        """Set the node of each client by the operator's list, which overrides the claims of nodes."""
        for client, node in listed.items():
            if client not in self.holders or self.holders[client].node != node:
                self.holders[client] = Holder(node, "")
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        holders = [
            {"client": client, "node": str(holder.node), "key": holder.key}
            for client, holder in sorted(self.holders.items())
            if client not in (self._new or ())
        ]
        refused = [{"node": str(node), "clients": sorted(clients)} for node, clients in self.refused.items()]
        write_whole(self._path, seal_table({"run": self._run, "holders": holders, "refused": refused}))


def operator_list(path: Path, clients: int) -> dict[int, int]:
    """The node of each client, from a TOML file with a line for each node: `4182736455 = [0, 1]`."""
    where = f"--nodes {path}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{where}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: it is not valid TOML ({error}); write lines such as 4182736455 = [0, 1]") from None
    listed: dict[int, int] = {}
    for node, held in table.items():
        if not (node.isdecimal() and len(node) <= 20) or not 0 < int(node) < 2**64:
            raise UserError(f"{where}: {node!r} is not the id of a SuperNode; `flwr supernode list` prints the ids")
        if not isinstance(held, list) or not all(type(i) is int for i in held):
            raise UserError(f"{where}: node {node}: give client numbers, as in {node} = [0, 1]")
        for i in held:
            if not 0 <= i < clients:
                raise UserError(f"{where}: client {i} does not exist; give numbers from 0 to {clients - 1}")
            if i in listed:
                raise UserError(f"{where}: client {i} is listed twice; list it at one node")
            listed[i] = int(node)
    if not listed:
        raise UserError(f"{where}: it names no client; write lines such as 4182736455 = [0, 1]")
    return listed
