"""Runs the plans in processes of their own and reports progress."""
