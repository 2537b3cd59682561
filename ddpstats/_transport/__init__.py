"""How bytes reach the other ranks, with a deadline; and the store: who is here, who waits, who died, the verdict."""
