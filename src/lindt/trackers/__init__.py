"""Trackers that people already use, each an optional extra, none on by default: `lindt run --track tensorboard`.

A tracker is called at the start of a run, after each round and at the end. It gets only what rounds.jsonl holds.
"""

from __future__ import annotations
