"""Libraries of others as backends: how each is found, given a layer, called, and what it cannot do."""
