"""Files that are not trusted, and files that are written whole or not at all. Imports no torch."""
