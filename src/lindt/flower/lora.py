"""Low-rank adapters: the divergence of the products B A, beside that of the factors (Hu et al. 2021, LoRA).

What an adapter adds to a frozen layer is B A. A and B alone are defined up to an invertible matrix: R A and B R^-1 add
the same. So clients that agree may send factors that lie far apart, and Delta (Eq. 7) of the factors is then large.
Two numbers of a round, over the layers whose arrays are named as PEFT names them, `lora_A` and `lora_B`:

    delta    the mean over clients of ||B_i A_i - B A||, with the strategy's own B and A
    spread   the same around the mean of the clients' products

`spread` is 0 where the clients agree. `delta` is then above 0 if the strategy has averaged A and B apart, since the
product of two means is not the mean of the products: what the clients agree on is lost in the aggregate.

Limits: the scale alpha / r of a layer is not sent and is taken as 1. The effect on B A of noise that the server adds to
A and B is not known: under a DP wrapper `delta` is left out. An A without its B, or a B without its A, is left out.

Legend: K clients answering, M = K + 1 models (the last one is the aggregate), r the rank, m x n a layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

LORA: Final = "lora_"  # in the name of an adapter's array
_FACTOR: Final = re.compile(r"(?P<before>(?:.*\.)?" + LORA + r"(?:embedding_)?)A(?P<after>(?:\..*)?)")
Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class ProductDivergence:
    """The divergence of the products in one round. `delta` is None where the server has added noise to the factors."""

    delta: float | None
    spread: float


def product_pairs(arrays: Mapping[str, Array]) -> list[tuple[str, str]]:
    """The names of A and B of each layer, where they can be multiplied. An A or a B alone is left out."""
    found = []
    for name in arrays:
        match = _FACTOR.fullmatch(name)
        partner = f"{match['before']}B{match['after']}" if match else ""
        if partner in arrays and _fit(arrays[name].shape, arrays[partner].shape):
            found.append((name, partner))
    return found


def _fit(a: Sequence[int], b: Sequence[int]) -> bool:
    """A is r x n (of a convolution r x n x k x k), B is m x r (m x r x 1 x 1)."""
    return len(a) >= 2 and len(b) >= 2 and a[0] == b[1] and math.prod(b[2:]) == 1


def factors_of(replies: Iterable[Message], sent: ArrayRecord | None = None) -> list[dict[str, Array]]:
    """The arrays of A and B in each valid reply, by name, as references: a strategy may take them out of its replies.

    `sent` is w^{r-1} where replies are updates of it.
    """
    found: list[dict[str, Array]] = []
    for reply in replies:
        if not reply.has_error():
            record = next(iter(reply.content.array_records.values()))
            names = [name for pair in product_pairs(record) for name in pair]
            if sent is not None and not set(names) <= sent.keys():
                return []
            found.append({name: record[name] if sent is None else _moved(sent[name], record[name]) for name in names})
    return found


def _moved(w: Array, update: Array) -> Array:
    return Array(w.numpy() + update.numpy())


def measure_products(
    factors_K: Sequence[Mapping[str, Array]], w: ArrayRecord, *, noisy: bool
) -> ProductDivergence | None:
    """The divergence of the products; None where there are no products, or a product overflows.

    It is computed from the inner products of all pairs of models, tr(A_i A_j^T B_j^T B_i), layer by layer: no m x n
    matrix is built, and memory holds the factors of one layer.
    """
    pairs = product_pairs(factors_K[0]) if factors_K else []
    if not pairs or not all(factors.keys() <= w.keys() for factors in factors_K):
        return None
    inner_MM: Floats = np.zeros((len(factors_K) + 1,) * 2)
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in pairs:
            inner_MM += _inner_products([(f[a], f[b]) for f in factors_K] + [(w[a], w[b])])
        squares_K = np.diagonal(inner_MM)[:-1]
        means_K = inner_MM[:-1, :-1].mean(1)
        far_K = squares_K - 2 * inner_MM[:-1, -1] + inner_MM[-1, -1]
        apart_K = squares_K - 2 * means_K + means_K.mean()
    if not (np.isfinite(far_K).all() and np.isfinite(apart_K).all()):
        return None
    # Rounding may turn a square of 0 into a small negative number.
    delta, spread = (float(np.sqrt(np.maximum(each_K, 0)).mean()) for each_K in (far_K, apart_K))
    return ProductDivergence(None if noisy else delta, spread)


def _inner_products(layer_M: Sequence[tuple[Array, Array]]) -> Floats:
    """<B_i A_i, B_j A_j> of one layer, for all i and j."""
    rank = layer_M[0][0].shape[0]
    a = np.concatenate([_matrix(a) for a, _ in layer_M])  # M r x n
    b = np.concatenate([_matrix(b).T for _, b in layer_M])  # M r x m
    both = (a @ a.T) * (b @ b.T)
    models = len(layer_M)
    found: Floats = both.reshape(models, rank, models, rank).sum((1, 3))
    return found


def _matrix(array: Array) -> NDArray[Any]:
    values = array.numpy().astype(np.float64)
    return values.reshape(len(values), -1)
