"""The live page: `lindt watch`. A small server that reads runs while they are written, and writes nothing."""

from __future__ import annotations
