"""End-to-end measurements of experts in a serving engine."""
