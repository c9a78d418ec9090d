"""What a run looks like beside the published results."""
