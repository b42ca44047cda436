"""Engines: they send tasks to clients and return the replies."""

from __future__ import annotations
