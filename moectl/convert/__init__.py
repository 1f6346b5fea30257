"""Conversion of expert weights between storage formats, kernel layouts and portable formats."""
