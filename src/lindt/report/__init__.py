"""What people read about a run: the verdict, tables, terminal charts, the page."""

from __future__ import annotations
