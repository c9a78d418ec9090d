"""Run directories: files that survive a kill, and how to read them."""
