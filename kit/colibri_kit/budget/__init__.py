"""What a model takes and how fast it will be, before it is on the board."""
