"""``ddpstats nan-origin``: the operation that made the first NaN, and storages that share memory."""
