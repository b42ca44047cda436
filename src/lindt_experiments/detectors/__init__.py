"""How well detectors tell negative federations from healthy ones."""
