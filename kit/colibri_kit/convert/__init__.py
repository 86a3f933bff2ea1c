"""From a GGUF to a checked .coli folder: adapters, types, packing, manifest, golden."""
