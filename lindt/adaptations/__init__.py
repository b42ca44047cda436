"""What a client learns for itself, one file each."""

from lindt.adaptations.apfl import Apfl
from lindt.adaptations.base import Adaptation, Context, GlobalOnly
from lindt.adaptations.dual import Dual
from lindt.adaptations.fine_tune import FineTuneHead
from lindt.adaptations.separate import Separate

__all__ = ["Adaptation", "Apfl", "Context", "Dual", "FineTuneHead", "GlobalOnly", "Separate"]
