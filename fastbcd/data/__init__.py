"""ImageData in memory or in a mapped file, pack, and the data sets that have a name."""
