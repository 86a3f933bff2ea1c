"""The service as clients and service managers see it: the real binary on a free port."""
