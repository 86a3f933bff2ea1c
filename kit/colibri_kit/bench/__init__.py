"""Benchmarks that need more than one command: the engine against llama.cpp under one memory limit."""
