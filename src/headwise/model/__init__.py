"""The model: layers, attention of every shape, transformers, decoding."""
