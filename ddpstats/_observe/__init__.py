"""This room observes a process without changing it: collectives, gradients before they are reduced, frames."""
