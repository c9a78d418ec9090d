"""Training: the one training loop, fine-tuning with a teacher, dense networks."""
