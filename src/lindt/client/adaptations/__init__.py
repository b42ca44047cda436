"""What a client learns for itself, one file each. A plan finds every class that a module in here registers."""
