"""Hostile inputs ("bombs") for every command, and the seconds and memory that each of them takes."""
