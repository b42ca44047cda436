"""The paper's evaluation on top of `lindt`: tables and figures as plans, outcomes of runs, claims as checks."""

from __future__ import annotations
