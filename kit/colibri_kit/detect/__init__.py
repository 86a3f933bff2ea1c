"""What is plugged in and what is near: media, serial ports, USB devices, boards on the network."""
