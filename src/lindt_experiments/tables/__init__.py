"""The paper's tables: ours beside the printed numbers."""
