"""The definition of the work of every contestant, and the protocol by which a contestant is asked for rounds.

A round is 10 clients x 500 pictures of 3 x 32 x 32, batch 10, one epoch of SGD at 0.1 with the gradient's norm
clipped to 5, then the plain mean of the weights: 500 steps of the paper's CNN, 217.8 GFLOP. The pictures are generated
from a seed, so that nothing is downloaded. Only numpy is needed here: not every contestant has torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

CLIENTS, CLASSES = 10, 10
SAMPLES = int(os.environ.get("LINDT_BENCH_SAMPLES", "500"))  # fewer in `make bench-smoke`
BATCH, RATE, MAX_NORM = 10, 0.1, 5.0
PARAMETERS = 940_362
GFLOP = 217.8  # to train 5,000 samples at 43.6 MFLOP each, forward and backward

WINDOW, CHARACTERS, WINDOW_BATCH, WINDOW_STEPS = 80, 80, 50, 8  # the LSTM's: 2 clients x 8 steps of 50 x 80

FEW = min(20, SAMPLES // 10)  # samples a client of the two large models
CONTEXT = 64  # characters that the transformer reads

Arrays = tuple[np.ndarray, np.ndarray]


def pictures(clients: int = CLIENTS, samples: int = SAMPLES, seed: int = 0) -> list[Arrays]:
    """One (x, y) pair per client: coarse blocks of colour, one pattern per class, with noise.

    They can be learned, but a fifth of the labels is wrong: so gradients neither vanish nor become slow denormals.
    """
    draw = np.random.default_rng(seed)
    patterns = draw.standard_normal((CLASSES, 3, 4, 4), dtype=np.float32).repeat(8, axis=2).repeat(8, axis=3)
    found = []
    for _ in range(clients):
        y = draw.integers(CLASSES, size=samples)
        x = patterns[y] + 0.5 * draw.standard_normal((samples, 3, 32, 32), dtype=np.float32)
        y = np.where(draw.random(samples) < 0.2, draw.integers(CLASSES, size=samples), y)
        found.append((x, y.astype(np.int64)))
    return found


def windows(
    clients: int = 2, samples: int = WINDOW_BATCH * WINDOW_STEPS, seed: int = 0, window: int = WINDOW
) -> list[Arrays]:
    """Text: characters and the one that follows them, each character the last one plus 0 or 1."""
    draw = np.random.default_rng(seed)
    walks = [
        (draw.integers(CHARACTERS, size=(samples, 1)) + draw.integers(2, size=(samples, window + 1)).cumsum(1))
        % CHARACTERS
        for _ in range(clients)
    ]
    return [(walk[:, :-1].astype(np.int64), walk[:, -1].astype(np.int64)) for walk in walks]


def rounds_wanted() -> tuple[argparse.ArgumentParser, Callable[[], argparse.Namespace]]:
    """The options that every contestant has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=0, help="play so many; 0: one for every line on standard input")
    return parser, parser.parse_args


class Report:
    """The output of a contestant: a line with the seconds of every requested round, and one JSON line at the end.

    Standard output is reserved for it: all other output of a peer goes to standard error.
    """

    def __init__(self, name: str, packages: tuple[str, ...], rounds: int, parameters: int = PARAMETERS) -> None:
        self.name, self.rounds, self.parameters = name, rounds, parameters
        self.versions = {package: version(package) for package in packages}
        self.seconds: list[float] = []
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def wanted(self) -> bool:
        """Wait for a line; returns whether another round is requested."""
        if self.rounds:
            return len(self.seconds) < self.rounds
        return bool(sys.stdin.readline())

    def took(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if not self.rounds:
            self._say({"seconds": seconds})

    def play(self, one_round: Callable[[], object]) -> None:
        while self.wanted():
            start = time.perf_counter()
            one_round()
            self.took(time.perf_counter() - start)

    def end(self, loss: float | None = None) -> None:
        """Print the JSON line. `loss`, of the final weights on the first client's data, shows that peers trained."""
        self._say(
            {
                "name": self.name,
                "versions": self.versions,
                "seconds": self.seconds,
                "parameters": self.parameters,
                "loss": loss,
            }
        )

    def _say(self, what: dict[str, object]) -> None:
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()
