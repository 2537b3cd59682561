"""A step that is kept, and run again: batch, random state, numerics settings, safe serialisation, no collectives."""
