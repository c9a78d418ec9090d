"""Where BCD starts: a network at B_ref, made by snl or autorep, or read from a file."""
