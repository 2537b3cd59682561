"""How bytes reach the other ranks within a deadline, and how all ranks know that they made the same call."""
