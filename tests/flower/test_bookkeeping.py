"""The server's numbering of nodes and its record of rounds."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("flwr")

from lindt.flower.recorder import RunRecorder


def test_numbering_many_nodes_takes_linear_time() -> None:
    books, nodes = RunRecorder(None), [2**60 + 3 * i for i in range(20_000)]
    began = time.process_time()
    books.ask(1, nodes, nodes)
    books.ask(2, nodes[::-1], nodes)
    assert time.process_time() - began < 2  # a search in a list takes 10 s or more
    assert [books.number(nodes[i]) for i in (0, 7, 19_999)] == [0, 7, 19_999]
    assert books.nodes == nodes
