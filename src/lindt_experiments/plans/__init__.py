"""Which runs each table and figure needs, as plans."""
