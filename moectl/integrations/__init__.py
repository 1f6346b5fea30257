"""moectl inside other libraries: their models, with experts that moectl loads and computes."""
