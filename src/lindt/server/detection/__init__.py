"""Detection of negative federated learning: the test of gains, the rule on weight divergence, and `Detector`."""
