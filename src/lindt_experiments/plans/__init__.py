"""The runs that each table and figure needs, as plans."""
