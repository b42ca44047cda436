"""FedRep (Collins et al. 2021, arXiv 2102.07078): in each round first the private head, then the shared body.

The head trains for 10 epochs, as in the authors' runs on CIFAR; the body for the plan's epochs of a round.
"""

from __future__ import annotations

from lindt.registry import register_method

register_method("fedrep", adaptation={"kind": "partial_sharing", "training": "in turn", "epochs": 10})
