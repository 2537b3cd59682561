"""``ddpstats compare``: two runs, the ranks of one, or two tensors."""
