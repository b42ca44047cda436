"""Transports: what carries tasks to clients and brings their replies."""
