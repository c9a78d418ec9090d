"""Scores of hypotheses: accuracy and loss on the train set, by three engines with equal results."""
