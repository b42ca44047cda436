"""The paper's figures, drawn from the stored results."""
