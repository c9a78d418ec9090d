"""Block Coordinate Descent: Algorithm 1 of the paper, and how a step proposes hypotheses."""
