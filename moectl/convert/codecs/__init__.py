"""Number formats: encode and decode, one file each."""
