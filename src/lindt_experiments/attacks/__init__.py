"""Every attack against every aggregator and recovery."""
