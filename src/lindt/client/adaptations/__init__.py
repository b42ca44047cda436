"""Adaptations: how a client trains a model of its own, one file each. A plan finds every class that registers here."""
