"""lindt: notices federated learning that hurts the people who join it, while it runs, and mends it."""

__version__ = "0.1.0"
