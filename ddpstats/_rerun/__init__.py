"""A step that is kept, and run again: record, state, codec, run, blame and digest."""
