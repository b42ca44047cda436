"""FedBABU (Oh et al. 2022, arXiv 2106.06042): the body is trained, the head keeps its random initial weights.

To predict, a client tunes the head for 5 epochs, at the round's rate, with the body fixed.
"""

from __future__ import annotations

from lindt.registry import register_method

register_method("fedbabu", adaptation={"kind": "partial_sharing", "training": "shared only", "epochs": 5})
