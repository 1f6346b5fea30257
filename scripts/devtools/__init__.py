"""Developer tools: conformance, recorded vectors, kernel inspection, catalogue entries. Not installed."""
