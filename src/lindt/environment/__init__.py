"""The environment of a federation: participation, attackers, privacy. Each acts at exactly one point of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from lindt.environment.participation import Participation, Sampled
from lindt.environment.privacy import NoPrivacy, Privacy
from lindt.environment.threats import NoThreat, Threat

__all__ = ["Environment"]


@final
@dataclass(frozen=True)
class Environment:
    participation: Participation = field(default_factory=Sampled)
    threat: Threat = field(default_factory=NoThreat)
    privacy: Privacy = field(default_factory=NoPrivacy)
