"""Is the federation negative? Weight divergence, the rules over it, and a detector for loops of one's own."""
