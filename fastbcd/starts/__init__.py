"""Where BCD starts: a net at B_ref, made here (snl, autorep) or read from an official file."""
