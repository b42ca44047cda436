"""The plan of a run, its components by name, and the problem: data, model, loss and metric."""
