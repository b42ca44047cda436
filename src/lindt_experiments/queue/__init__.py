"""Plays plans in separate processes and reports progress."""
