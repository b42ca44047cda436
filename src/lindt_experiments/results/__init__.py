"""What finished runs left, kept in the repository."""
