"""What every room needs of the process: ranks, checks of numbers, memory, precision, files."""
