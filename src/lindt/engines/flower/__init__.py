"""The engine for more than one machine: tasks and replies through Flower's Grid."""
