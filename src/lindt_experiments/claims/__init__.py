"""The paper's findings as checks over the kept results."""
