"""Transports: what carries tasks to clients and brings their replies."""

from __future__ import annotations
