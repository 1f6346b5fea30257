"""Storage formats, kernel layouts, and the streaming conversion between them."""
