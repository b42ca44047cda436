"""The engine of worker processes on one machine."""
