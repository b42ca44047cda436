"""Whether an app's train function trains with DP-SGD by opacus, seen from outside.

opacus' DPOptimizer sets an attribute `summed_grad` on each parameter, adds noise to it, and then calls the step of the
torch optimizer that it wraps. A hook of torch on the steps of all optimizers finds the attribute there. It costs one
look at a parameter group per step, and nothing where opacus is not imported.

Limits: noise of the app's own code, of another package or in another process is not seen. When the train function
itself imports opacus, its first call counts as DP-SGD whatever it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

MARK = "summed_grad"


@final
@dataclass
class Noticed:
    dp_sgd: bool = False


@contextmanager
def noticing_dp_sgd() -> Iterator[Noticed]:
    """Notice DP-SGD in the block."""
    noticed = Noticed()
    if "opacus" not in sys.modules:
        yield noticed
        noticed.dp_sgd = "opacus" in sys.modules
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(optimizer: Any, *_: Any) -> None:
        if not noticed.dp_sgd:
            noticed.dp_sgd = any(hasattr(p, MARK) for group in optimizer.param_groups for p in group["params"])

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield noticed
    finally:
        hook.remove()
