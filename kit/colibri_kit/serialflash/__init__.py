"""A board over its serial console alone: at a U-Boot prompt or at a Linux shell."""
