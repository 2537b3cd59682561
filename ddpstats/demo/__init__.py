"""`ddpstats demo`: wrong averages, then right ones."""
