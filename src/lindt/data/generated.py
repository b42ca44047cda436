"""Synthetic data, the same in every run: for experiments and tests without a download.

They have the shape of the paper's data, but say nothing about the paper's tasks.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lindt.data.partition import FloatArray
from lindt.data.shakespeare import ALPHABET, window_pools
from lindt.data.sources import PAPERS_TEXT, Crowd, Pools, Text, register_source, split_by_class
from lindt.seeds import seed_for

CLASSES, SAMPLES, SIDE = 10, 4000, 8
NOISE = 0.8  # the noise, in standard deviations of the patterns
ROLES, SHORTEST, LONGEST = 30, 2500, 5000
LETTERS = " etaoinshrdlucmfwygpbvk,.'"
OWN = 0.6  # the share of a role's own transition probabilities; the rest is common to all roles
MEMBERS, EACH, FEATURES, LABELS = 40, 100, 16, 6  # of the two camps: roles, samples per role, inputs, labels
OF_A_CROWD = 20  # samples of a client of the crowd
CLOSE = 1.3  # the noise of a sample, times the spread of the classes' centres


@register_source("generated-pictures")
def pictures(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """4,000 pictures of 3 x 8 x 8 in ten classes: one pattern per class, with noise. For `Cnn(side=8, kernel=2)`."""
    draw = np.random.default_rng(seed_for(0, "generated", "pictures"))
    patterns = draw.normal(size=(CLASSES, SIDE // 2, SIDE // 2, 3)).repeat(2, axis=1).repeat(2, axis=2)
    y = np.arange(SAMPLES) % CLASSES
    values = patterns[y] + draw.normal(scale=NOISE, size=(SAMPLES, SIDE, SIDE, 3))
    x = np.clip(np.round(128 + 24 * values), 0, 255).astype(np.uint8)
    train, test = split_by_class(y, test_share, seed)
    names = tuple(f"pattern {label}" for label in range(CLASSES))
    return Pools(torch.from_numpy(x), torch.from_numpy(y), train, test, CLASSES, names, prepare=prepare)


def prepare(x: Tensor) -> Tensor:
    """Bytes to floats around 0; height x width x channel in memory is channels last already."""
    return ((x.float() - 128) / 48).permute(0, 3, 1, 2)


@register_source("generated-text")
def speech(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """30 roles of 2,500 to 5,000 characters, each from a Markov chain of its own, as windows like Shakespeare's."""
    draw = np.random.default_rng(seed_for(0, "generated", "text"))
    lengths = draw.integers(SHORTEST, LONGEST, size=ROLES, endpoint=True)
    habits = OWN * _chains(draw, ROLES) + (1 - OWN) * _chains(draw, 1)
    places = _walk(draw, habits, int(lengths.max()))
    codes = np.array([ALPHABET.index(letter) for letter in LETTERS], dtype=np.uint8)
    spoken = np.concatenate([codes[places[role, :length]] for role, length in enumerate(lengths)])
    names = [f"role {role}" for role in range(ROLES)]
    return window_pools(spoken, np.cumsum(lengths), names, text, test_share, seed)


def _chains(draw: np.random.Generator, chains: int) -> FloatArray:
    """The transition probabilities of letters, (chains, from, to): a few of each row are likely."""
    weights = draw.exponential(size=(chains, len(LETTERS), len(LETTERS))) ** 8
    found: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return found


def _walk(draw: np.random.Generator, habits: FloatArray, steps: int) -> NDArray[np.int64]:
    """The letters of all roles, step by step: each by its role's probabilities and the letter before."""
    up_to = habits.cumsum(axis=-1)
    up_to[:, :, -1] = 1.0
    everyone = np.arange(len(habits))
    places = np.zeros((len(habits), steps), dtype=np.int64)
    chances = draw.random((steps, len(habits)))
    for step in range(1, steps):
        rows = up_to[everyone, places[:, step - 1]]
        places[:, step] = (rows < chances[step][:, None]).sum(axis=1)
    return places


@register_source("generated-clusters")
def clusters(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """3,000 samples of 16 numbers in ten classes, each of two clusters that overlap with others. For `Mlp(16)`."""
    draw = np.random.default_rng(seed_for(0, "generated", "clusters"))
    centres = draw.normal(size=(2 * CLASSES, FEATURES))
    which = np.arange(3000) % len(centres)
    x = centres[which] + draw.normal(scale=0.75, size=(len(which), FEATURES))
    y = which % CLASSES
    train, test = split_by_class(y, test_share, seed)
    names = tuple(f"class {label}" for label in range(CLASSES))
    return Pools(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), train, test, CLASSES, names)


@register_source("two-camps")
def two_camps(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """40 roles in two camps that give the same samples other labels: all six labels contradict."""
    return _camps(LABELS, test_share, seed)


@register_source("two-camps-in-part")
def two_camps_in_part(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """The two camps agree on four labels and contradict each other on two."""
    return _camps(2, test_share, seed)


@register_source("two-camps-crowd")
def crowd(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Crowd:
    """The two camps with any number of clients, each made when it is visited: 20 samples, odd numbers in the second."""
    centres = np.random.default_rng(seed_for(0, "generated", "two camps")).normal(size=(LABELS, FEATURES))
    tested = min(max(round(test_share * OF_A_CROWD), 1), OF_A_CROWD - 2)

    def make(client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        draw = np.random.default_rng(seed_for(seed, "generated", "crowd", client))
        classes = draw.integers(LABELS, size=OF_A_CROWD)
        x = torch.from_numpy((centres[classes] + draw.normal(scale=CLOSE, size=(OF_A_CROWD, FEATURES))).astype("f4"))
        y = torch.from_numpy(classes ^ 1 if client % 2 else classes)  # the second camp swaps 0 and 1, 2 and 3, 4 and 5
        return (x[tested:], y[tested:]), (x[:tested], y[:tested])

    return Crowd(make, LABELS, tuple(f"label {label}" for label in range(LABELS)))


def _camps(contradicted: int, test_share: float, seed: int) -> Pools:
    """Gaussian clusters of 16 numbers, one per class. The second camp swaps the first `contradicted` labels in pairs.

    With the allocation `roles` a client is of one camp; with every other allocation it has samples of both.
    """
    draw = np.random.default_rng(seed_for(0, "generated", "two camps"))
    centres = draw.normal(size=(LABELS, FEATURES))
    roles = np.arange(MEMBERS).repeat(EACH)
    classes = draw.integers(LABELS, size=len(roles))
    x = centres[classes] + draw.normal(scale=CLOSE, size=(len(roles), FEATURES))
    other = np.arange(LABELS)
    other[:contradicted] = other[:contradicted] ^ 1  # swaps 0 and 1, 2 and 3, 4 and 5
    y = np.where(roles % 2 == 1, other[classes], classes)
    train, test = split_by_class(roles, test_share, seed)  # a share of every role
    return Pools(
        torch.from_numpy(x.astype(np.float32)),
        torch.from_numpy(y),
        train,
        test,
        LABELS,
        tuple(f"label {label}" for label in range(LABELS)),
        roles=torch.from_numpy(roles),
        role_names=tuple(f"{'second' if role % 2 else 'first'} camp, {role // 2}" for role in range(MEMBERS)),
    )
