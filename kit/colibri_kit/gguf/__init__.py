"""GGUF v2/v3: a reader for hostile files and a streaming writer."""
