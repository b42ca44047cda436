"""A Flower app: adapters of a small causal transformer, one client a speaking role."""
