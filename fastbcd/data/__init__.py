"""Images in memory: ImageData, and what it can be made from.

data = fastbcd.load("fashion-mnist-mini", "train")      # by name; this one is embedded
data = ImageData.from_arrays(images, labels)            # or from arrays, Dataset, DataLoader
"""

from fastbcd.data.images import ImageData, view_count
from fastbcd.data.sources import as_data, load

__all__ = ["ImageData", "as_data", "load", "view_count"]
