"""Every method of recovery in the same federations: gains, clients worse off, and costs."""
