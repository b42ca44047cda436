"""lindt.data"""

from __future__ import annotations
