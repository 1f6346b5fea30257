"""An engine's parameters compared with those that moectl's chains make, by name, type, stride and bytes."""
