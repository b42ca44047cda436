"""Trackers that people already use, each an optional extra, none on by default: `lindt run --track tensorboard`.

A tracker is told that a run begins, each round, and the end. It sees what rounds.jsonl holds, and nothing else.
"""

from __future__ import annotations
