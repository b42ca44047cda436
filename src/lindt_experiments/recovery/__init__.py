"""Every method of recovery in the same federations: who gains, who is left worse off, and what it costs."""
