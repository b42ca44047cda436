"""w_i of a reply as views of its bytes, and sums over K such vectors in chunks of coordinates.

A strategy may take arrays out of the replies (FedMedian, FedTrimmedAvg, Bulyan), and a DP wrapper puts others in their
place. The bytes of a Flower Array are of Python's type `bytes`, which does not change: a view of them keeps the values
that the client sent, and needs no memory of its own while the replies exist. Statistics that need all clients read a
chunk of coordinates of each, so that their memory does not grow with K or P. A pass over all replies runs in two
threads, since NumPy and BLAS release the GIL. Each thread has a fixed part, so that sums do not depend on their speed.

Limits: arrays of the other byte order are copied. Those in Fortran's order are read through an iterator, which is slow.

Legend: K clients answering, P weights, C weights of one chunk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from lindt.gains import LONGEST
from lindt.protocols import NORM_STATISTICS
from lindt.server.detection.divergence import CANCELLED

Values = NDArray[Any]
Vector = tuple[Values, ...]  # the arrays of w, in the order of their names; an array in C's order has one dimension
Piece = tuple[int, slice, slice]  # index of an array in a vector, range of its values, their place in the chunk
# Floats of all K clients: 1.3 MB, so that a chunk stays in the cache. From 460,800 on OpenBLAS starts own threads.
CHUNK: Final = 10 * 2**15
LEAST: Final = 2**11  # floats of one client in a chunk
LINE: Final = 16  # floats in a cache line of 64 bytes: rows that begin at a cache line are written faster
THREADS: Final = 2

Item = TypeVar("Item")
Result = TypeVar("Result")

# The header that np.save writes in format 1.0, as Flower's apps send it: of booleans, whole numbers and floats only.
_HEAD: Final = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|]?[biuf][1248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,15}(?:, ?|(?=\)))){0,32})\), \} *\n",
    re.DOTALL,
)


def values_of(array: Array) -> Values:
    """The values of `array.numpy()`, as a view. ValueError also where the Array declares another shape.

    NumPy's own reader allocates memory for the shape in the header before it reads the values. Here the number of bytes
    must fit the shape.
    """
    head = _HEAD.match(array.data) if array.stype == "numpy.ndarray" else None
    if head is None or head.end() != 10 + int.from_bytes(head[1], "little"):
        raise ValueError("its weights are not numbers in the format of numpy.save")
    try:
        dtype = np.dtype(head[2].decode())
    except TypeError:
        raise ValueError(f"its weights are of type {head[2]!r}, which NumPy does not have") from None
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", head[4]))
    if shape != tuple(array.shape):
        raise ValueError(f"its weights have shape {shape[:8]}, but it declares shape {tuple(array.shape)[:8]}")
    if len(array.data) - head.end() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its weights have {len(array.data)} bytes, which do not fit shape {shape[:8]} of {dtype}")
    values = np.frombuffer(array.data, dtype, offset=head.end()).astype(dtype.newbyteorder("="), copy=False)
    return values.reshape(shape, order="F" if head[3] == b"True" else "C")


def own_values(array: Array) -> Values:
    """The values of an array of the server's own: a view where possible."""
    try:
        return values_of(array)
    except ValueError:
        return array.numpy()


def vector_of(values: Mapping[str, Values], names: frozenset[str]) -> Vector:
    """w as views, in the order of names, without BatchNorm's statistics."""
    chosen = [values[name] for name in sorted(values) if name in names and not name.endswith(NORM_STATISTICS)]
    return tuple(_flattened(one) for one in chosen if np.issubdtype(one.dtype, np.floating))


def record_vector(record: Mapping[str, Array], names: frozenset[str]) -> Vector:
    """w of a record of the server's own."""
    return vector_of({name: own_values(array) for name, array in record.items() if name in names}, names)


def sizes_of(vector: Vector) -> tuple[int, ...]:
    return tuple(values.size for values in vector)


def _flattened(values: Values) -> Values:
    return values.reshape(-1) if values.flags.c_contiguous else values


def _part(values: Values, of: slice) -> Values:
    """Some values, in C's order. Of an array in another order only these values are copied; `ravel` would copy all."""
    if values.ndim == 1:
        return values[of]
    copied: Values = values.flat[of]
    return copied


def chunk_size(clients: int) -> int:
    """Floats of one client in a chunk of K clients."""
    return max(LEAST, CHUNK // max(1, clients) // LINE * LINE)


def chunks(sizes: Sequence[int], clients: int = 1) -> Iterator[list[Piece]]:
    """All coordinates of vectors of these sizes, in chunks; small arrays share one."""
    most = chunk_size(clients)
    pieces: list[Piece] = []
    filled = 0
    for place, size in enumerate(sizes):
        done = 0
        while done < size:
            step = min(size - done, most - filled)
            pieces.append((place, slice(done, done + step), slice(filled, filled + step)))
            done, filled = done + step, filled + step
            if filled == most:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def in_parts(work: Callable[[Sequence[Item]], Result], items: Sequence[Item]) -> list[Result]:
    """What `work` gives for consecutive parts of the items, one part a thread, in the order of the items.

    Floating-point warnings are off: clients and strategies may send any values.
    """

    def quietly(part: Sequence[Item]) -> Result:
        with np.errstate(all="ignore"):  # here, as a thread does not inherit it
            return work(part)

    step = max(1, math.ceil(len(items) / THREADS))
    parts = [items[start : start + step] for start in range(0, len(items), step)]
    if len(parts) < 2:
        return [quietly(part) for part in parts]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(quietly, parts))


def read(vector: Vector, pieces: Sequence[Piece]) -> Values:
    """A chunk of one vector, to be read only; a view where the chunk is part of one array.

    It is float64 where one of its arrays is: in float32 a small difference would be lost in rounding.
    """
    if len(pieces) == 1:
        place, of, _ = pieces[0]
        part_C = _part(vector[place], of)
        return part_C.astype(np.promote_types(part_C.dtype, np.float32), copy=False)
    found_C = np.empty(pieces[-1][2].stop, np.result_type(np.float32, *(vector[place].dtype for place, _, _ in pieces)))
    for place, of, to in pieces:
        found_C[to] = _part(vector[place], of)
    return found_C


def subtract(vectors_K: Sequence[Vector], from_C: Values | None, pieces: Sequence[Piece], buffer: Values) -> Values:
    """A chunk of each of K vectors, less that of another vector where one is given: K rows of `buffer`."""
    clients, size = len(vectors_K), pieces[-1][2].stop
    found_KC = buffer[: clients * size].reshape(clients, size)
    for place, of, to in pieces:
        other_C = None if from_C is None else from_C[to]
        for row_C, vector in zip(found_KC[:, to], vectors_K, strict=True):
            if other_C is None:
                row_C[:] = _part(vector[place], of)
            else:
                np.subtract(_part(vector[place], of), other_C, out=row_C, casting="same_kind")
    return found_KC


def buffer_for(sizes: Sequence[int], clients: int) -> Values:
    """Memory for one chunk of K vectors, which begins at a cache line."""
    size = clients * min(sum(sizes), chunk_size(clients))
    found = np.empty(size + LINE, np.float32)
    start = -found.ctypes.data % (4 * LINE) // 4
    return found[start : start + size]


def row_squares(rows_KC: Values) -> NDArray[np.float64]:
    """|a_k|^2 of each row. BLAS sums in the type of the rows: for the length of a chunk float32 is precise enough."""
    return np.matmul(rows_KC[:, None, :], rows_KC[:, :, None])[:, 0, 0].astype(np.float64)


def distance_squares(
    rows_KC: Values, squares_K: NDArray[np.float64], from_C: Values, buffer: Values
) -> NDArray[np.float64]:
    """|a_k - b|^2 of each row from |a_k|^2, by expansion; from a_k - b where that would lose digits."""
    square = float(np.dot(from_C, from_C))
    found_K = squares_K - 2.0 * (rows_KC @ from_C).astype(np.float64) + square
    if (found_K >= CANCELLED * (squares_K + square)).all():
        return found_K
    difference_KC = buffer[: rows_KC.size].reshape(rows_KC.shape)
    np.subtract(rows_KC, from_C, out=difference_KC)
    return row_squares(difference_KC)


def update_squares(
    vectors_K: Sequence[Vector], base: Vector | None, *, updates: bool = False
) -> tuple[NDArray[np.float64], float]:
    """|w_i - w^{r-1}|^2 of each client and |w^{r-1}|^2, in one pass. NaN and infinity are kept.

    Args:
        vectors_K: The weights that the clients sent or, with `updates`, their updates.
        base: w^{r-1}; None where the clients return other arrays: their weights then count as updates of 0.
    """
    sizes, clients = sizes_of(vectors_K[0]), len(vectors_K)

    def sums(part: Sequence[list[Piece]]) -> tuple[NDArray[np.float64], float]:
        found_K, square, buffer = np.zeros(clients), 0.0, buffer_for(sizes, clients)
        for pieces in part:
            base_C = None if base is None else read(base, pieces)
            found_K += row_squares(subtract(vectors_K, None if updates else base_C, pieces, buffer))
            square += 0.0 if base_C is None else float(np.dot(base_C, base_C))
        return found_K, square

    parts = in_parts(sums, list(chunks(sizes, clients)))
    return sum((found_K for found_K, _ in parts), np.zeros(clients)), sum(square for _, square in parts)


def distances(vectors_K: Sequence[Vector], other: Vector) -> NDArray[np.float64]:
    """||a_k - b|| of each vector."""
    sizes, clients = sizes_of(other), len(vectors_K)

    def squares(part: Sequence[list[Piece]]) -> NDArray[np.float64]:
        found_K, buffer = np.zeros(clients), buffer_for(sizes, clients)
        for pieces in part:
            found_K += row_squares(subtract(vectors_K, read(other, pieces), pieces, buffer))
        return found_K

    return np.sqrt(sum(in_parts(squares, list(chunks(sizes, clients))), np.zeros(clients)))


def square_of(values: Values) -> float:
    """The sum of squares of an array; float16 as float32, since it would overflow. NaN and infinity are kept."""
    total, kind, flattened = 0.0, np.promote_types(values.dtype, np.float32), _flattened(values)
    for pieces in chunks([values.size]):
        part_C = _part(flattened, pieces[0][1]).astype(kind, copy=False)
        with np.errstate(all="ignore"):  # a client may send any values
            total += float(np.dot(part_C, part_C))
    return total


def difference_square(values: Values, others: Values) -> float:
    """The sum of squares of a - b, computed in the type of the arrays where that is a float type."""
    total, kind = 0.0, np.result_type(values.dtype, others.dtype)
    kind = kind if np.issubdtype(kind, np.floating) else np.dtype(np.float64)
    a, b = _flattened(values), _flattened(others)
    for pieces in chunks([values.size]):
        of = pieces[0][1]
        with np.errstate(all="ignore"):
            part_C = np.subtract(_part(a, of), _part(b, of), dtype=kind)
            total += float(np.dot(part_C, part_C))
    return total


def length_fault(values: Sequence[Values], square: float, too_long: str) -> str | None:
    """The fault of arrays with this sum of squares, None without a fault; `too_long` is the text for finite values."""
    if square <= LONGEST**2:  # false for NaN
        return None
    finite = all(
        np.isfinite(_part(_flattened(one), pieces[0][1])).all() for one in values for pieces in chunks([one.size])
    )
    return too_long if finite else "NaN or infinity"
