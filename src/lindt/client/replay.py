"""A step's operators, recorded once and played again with other numbers: same kernels, same order, same bits.

A step of the paper's CNN is 76 operators. Around them Python runs the layers, autograd builds its graph, the graph is
searched for thin gradients and walked back: the same each time, for a tenth of the time. A tape keeps only the
operators, as torch's dispatcher sees them below autograd, with the places where their operands come from and go to.

What a tape cannot be of is refused while it is recorded, and the step is then taken the long way for good: a value
that Python asked for (`.item()`), a shape that depends on values, a generator of one's own, a tensor that is neither
an input nor made on the way. What cannot be seen there is a choice that Python made by itself; so only layers that
make none are recorded (see client/sgd.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_UNFORESEEN: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Slot(NamedTuple):
    """Where a tensor lies while a tape is played."""

    place: int


class _Operation(NamedTuple):
    operator: Callable[..., Any]
    operands: Callable[[list[Any]], Sequence[Any]]  # taken from the slots
    options: dict[str, Any]
    into: int | list[int]  # the slot of its result, or one for each of several
    last: list[int]  # slots that nothing after it reads


@final
class Tape:
    """Operators to be played on inputs of the same shapes. It holds no tensor; constants have slots of their own."""

    def __init__(self, operations: Sequence[_Operation], slots: Sequence[Any], results: Sequence[int]) -> None:
        self._operations, self._slots, self._results = list(operations), list(slots), list(results)

    def __len__(self) -> int:
        return len(self._operations)

    @torch.inference_mode()
    def play(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        slots = self._slots.copy()
        slots[: len(inputs)] = inputs
        for operator, operands, options, into, last in self._operations:
            made = operator(*operands(slots), **options)
            if type(into) is int:
                slots[into] = made
            else:
                for slot, tensor in zip(into, made, strict=True):  # type: ignore[arg-type]
                    slots[slot] = tensor
            for slot in last:
                slots[slot] = None
        return [slots[slot] for slot in self._results]


def record(work: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Tape | None:
    """Do the work, which counts, and give the tape of it; None where it cannot be played again."""
    recorder = _Recorder(inputs)
    with recorder:
        results = work()
    return recorder.tape(results)


@final
class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[Tensor] = []  # all of them stay, so that no other takes their id
        self._slot: dict[int, int] = {}
        self._made: list[tuple[Any, list[Any], dict[str, Any], int | list[int]]] = []
        self._untransposed: dict[int, int] = {}
        self._slots = 0
        self._refused = False
        for tensor in inputs:
            self._refused |= id(tensor) in self._slot  # the same one twice may be two the next time
            self._new(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator would import torch's compiler, a second's work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if not self._refused:
            try:
                self._note(func, args, options, result)
            except _RefusedError:
                self._refused = True
        return result

    def _note(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        if _UNFORESEEN.intersection(func.tags):
            raise _RefusedError
        arguments, named = [self._operand(one) for one in args], {n: self._operand(one) for n, one in options.items()}
        if any(isinstance(one, _Slot) for one in named.values()):
            raise _RefusedError  # no operator of a step has any
        if func is _aten.detach.default:  # nothing is detached where no graph is built
            self._same(result, arguments[0].place)
        elif func is _aten.t.default and arguments[0].place in self._untransposed:
            self._same(result, self._untransposed[arguments[0].place])
        else:
            several = isinstance(result, list | tuple)
            into = [self._result(one) for one in result] if several else self._result(result)
            if func is _aten.t.default:
                self._untransposed[self._result(result)] = arguments[0].place
            self._made.append((func, arguments, named, into))

    def _operand(self, one: Any) -> Any:
        if isinstance(one, Tensor):
            if id(one) not in self._slot:
                raise _RefusedError
            return _Slot(self._slot[id(one)])
        if isinstance(one, torch.Generator):
            raise _RefusedError
        if isinstance(one, list | tuple):
            return [self._operand(each) for each in one]
        return one

    def _result(self, one: Any) -> int:
        if one is None:
            return -1  # a gradient that was not asked for
        if not isinstance(one, Tensor):
            raise _RefusedError
        return self._slot[id(one)] if id(one) in self._slot else self._new(one)

    def _new(self, tensor: Tensor) -> int:
        self._slots += 1
        return self._same(tensor, self._slots - 1)

    def _same(self, tensor: Tensor, slot: int) -> int:
        self._seen.append(tensor)
        self._slot[id(tensor)] = slot
        return slot

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        if self._refused or any(id(tensor) not in self._slot for tensor in results):
            return None
        kept = [self._slot[id(tensor)] for tensor in results]
        slots: list[Any] = [None] * self._slots
        needed = set(kept)
        operations = []
        for func, arguments, options, into in reversed(self._made):
            touched = {slot for one in arguments for slot in _slots_of(one)}.union(
                [into] if type(into) is int else into
            )
            last = sorted(touched - needed - {-1})
            needed |= touched
            called = getattr(func, "_op", func)  # what func itself calls, half a microsecond later
            operations.append(_Operation(called, _operands(arguments, slots), options, into, last))
        return Tape(operations[::-1], [*slots, None], kept)  # the last one for gradients that were not asked for


class _RefusedError(Exception):
    """It cannot be played again."""


def _slots_of(one: Any) -> set[int]:
    if isinstance(one, _Slot):
        return {one.place}
    return {slot for each in one for slot in _slots_of(each)} if isinstance(one, list) else set()


def _operands(arguments: list[Any], slots: list[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """How an operator's arguments are taken from the slots; constants are put into new ones."""
    if any(isinstance(one, list) and _slots_of(one) for one in arguments):
        return lambda slots: [_filled(one, slots) for one in arguments]
    places = []
    for one in arguments:
        places.append(one.place if isinstance(one, _Slot) else len(slots))
        if not isinstance(one, _Slot):
            slots.append(one)
    if len(places) < 2:
        return lambda slots: [slots[place] for place in places]
    return itemgetter(*places)


def _filled(one: Any, slots: list[Any]) -> Any:
    if isinstance(one, _Slot):
        return slots[one.place]
    return [_filled(each, slots) for each in one] if isinstance(one, list) else one
