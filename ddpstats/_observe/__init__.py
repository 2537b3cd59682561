"""What the process does, seen without changing it: collectives, gradients before they are reduced, modules."""
