"""What is asked for: a plan, its components by name, and the problem that they describe."""
