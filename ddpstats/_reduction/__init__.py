"""Nested stats: from leaves to the slots of an agreed layout, one all_reduce, and back."""
