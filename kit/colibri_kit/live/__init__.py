"""A running service seen from the desk: forwarded ports, live figures, its journal."""
