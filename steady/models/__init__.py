"""Same weights, same logits: Hugging Face in and out, adapters, device, layers that are fast."""
