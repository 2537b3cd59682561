"""Carries bytes to the other ranks within a deadline, and proves that all ranks made the same call."""
