"""Writing commands that are killed, refused by the system, cut off from power, or raced."""
