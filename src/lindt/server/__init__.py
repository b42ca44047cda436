"""The server's side of a round: collect updates, aggregate, detect, decide on recovery, score."""
