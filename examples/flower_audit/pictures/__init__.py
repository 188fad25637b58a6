"""A small Flower app: three clients learn to tell photos apart."""
