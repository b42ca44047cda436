"""The commands of `lindt`, a file for each kind. None imports torch before it needs it."""
