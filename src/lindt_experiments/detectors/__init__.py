"""The scoreboard of detectors: how well they separate negative federations from healthy ones."""
