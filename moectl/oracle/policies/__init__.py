"""One file per policy: an engine's preferences as rows."""
