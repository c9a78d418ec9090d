"""The engine `collapsed`: a network with few ReLUs as an affine map with kinks."""
