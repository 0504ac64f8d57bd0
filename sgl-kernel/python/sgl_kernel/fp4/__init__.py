"""NVFP4 on both sides of a product: weights and activations in 4 bits."""
