"""torch.fx: tracing a network and rewriting it for speed."""
