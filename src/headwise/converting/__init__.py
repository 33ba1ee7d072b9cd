"""A checkpoint at another shape: lower rank, fewer KV heads, a latent, wider or more heads."""
