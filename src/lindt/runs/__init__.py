"""A run on disk: play it, keep each round, resume it, summarise it, export its models."""
