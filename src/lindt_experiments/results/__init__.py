"""The outcomes of finished runs, stored in the repository."""
