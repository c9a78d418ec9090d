"""Images in memory: ImageData, and every format it reads."""
