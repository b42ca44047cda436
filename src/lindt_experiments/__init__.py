"""The paper's evaluation on top of `lindt`: its tables and figures as plans, what runs left, its claims as checks."""

from __future__ import annotations
