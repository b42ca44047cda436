"""What stays with a client: its data, its private model v_i, and how it trains."""
