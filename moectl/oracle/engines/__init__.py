"""One folder for each engine and version: all that is known of it. `registry` lists them."""
