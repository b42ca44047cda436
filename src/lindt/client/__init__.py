"""The client's side: its data, its private model v_i, and its training. Data and v_i never leave the client."""
