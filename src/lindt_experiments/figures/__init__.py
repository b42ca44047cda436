"""The paper's figures, drawn from the kept results."""
