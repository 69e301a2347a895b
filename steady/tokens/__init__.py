"""A sample is a function of (seed, position): token files, tokenizers, order, packing."""
