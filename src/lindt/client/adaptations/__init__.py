"""What a client learns for itself, one file each."""

from __future__ import annotations

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.separate import Separate
from lindt.protocols import Adaptation, Context

__all__ = ["Adaptation", "Apfl", "Context", "Dual", "FineTuneHead", "GlobalOnly", "Separate"]
