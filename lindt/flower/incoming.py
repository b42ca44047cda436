"""What a mod reads from a message before anything trains."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message

from lindt.errors import UserError
from lindt.flower.orders import Order
from lindt.penalties import NoPenalty, Penalty, Proximal

Next = Callable[[Message, Context], Message]


def order_of(message: Message) -> Order | None:
    try:
        return Order.read(message)
    except ValueError as error:
        raise UserError(f"the server's order cannot be understood: {error}") from None


def record_of(message: Message) -> ArrayRecord:
    records = message.content.array_records
    if len(records) != 1:
        raise UserError(f"the message has {len(records)} records of weights; lindt needs one that holds the model")
    return next(iter(records.values()))


def penalty_of(message: Message) -> Penalty:
    """FedProx tells its clients mu in the config; w keeps to it in recovery as well."""
    mu = next(iter(message.content.config_records.values())).get("proximal-mu", 0.0)
    return Proximal(mu) if isinstance(mu, int | float) and mu > 0 else NoPenalty()


def must_be_last(call_next: Next) -> None:
    if getattr(call_next, "__module__", "").startswith("flwr.") and "make_ffn" in call_next.__qualname__:
        raise UserError("mods: LindtMod must be the last of them, or clipping and the like would be passed over")
