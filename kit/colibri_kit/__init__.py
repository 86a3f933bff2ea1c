"""colibri-kit: Mixture-of-Experts language models on small boards."""

__version__ = "0.1.0"
