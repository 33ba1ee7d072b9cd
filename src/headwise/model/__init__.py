"""The model: layers, attention of every shape, transformers, how they start, decoding."""

# How weights are drawn at the start; model/init.py says what each does. Here, so that a recipe can
# be checked without torch.
INITS = ("library", "published", "original", "normal", "spectral", "orthogonal")
