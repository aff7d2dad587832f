"""Model and optimizer state dicts of wrapped models."""
