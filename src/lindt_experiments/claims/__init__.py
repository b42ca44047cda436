"""The paper's findings as checks of the stored results."""
