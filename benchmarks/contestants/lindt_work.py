"""The work as problems of lindt, which worker processes can load by name (`--task`)."""

from __future__ import annotations

from plain_torch import WORKS
from work import pictures, windows

import lindt
from lindt.plan.models import Cnn, Lstm

EVALUATED = 1000  # pictures a client


def cnn() -> lindt.Problem:
    return lindt.Problem([(client, _few(client)) for client in pictures()], Cnn().build)


def lstm() -> lindt.Problem:
    return lindt.Problem([(client, _few(client)) for client in windows()], Lstm().build)


def resnet() -> lindt.Problem:
    return problem_of("resnet")


def transformer() -> lindt.Problem:
    return problem_of("transformer")


def problem_of(name: str, clients: int | None = None) -> lindt.Problem:
    """A work as the peers have it, with their module."""
    work = WORKS[name]
    return lindt.Problem([(client, _few(client)) for client in work.data()[:clients]], work.model)


def evaluation() -> lindt.Problem:
    return lindt.Problem([(_few(client), client) for client in pictures(samples=EVALUATED)], Cnn().build)


def _few(client: tuple) -> tuple:
    x, y = client
    return x[:10], y[:10]
