"""FedPer (Arivazhagan et al. 2019, arXiv 1912.00818): a shared body and a private head that train together."""

from __future__ import annotations

from lindt.registry import register_method

register_method("fedper", adaptation={"kind": "partial_sharing", "training": "together"})
