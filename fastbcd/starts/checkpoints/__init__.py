"""Official checkpoints of SNL, AutoReP and ReLUPruner as networks that are ready for `bcd`."""
