"""One of two parties, in an engine's own environment: no torch, nothing else of fastbcd."""
