"""The verbs that read dumps: ``ddpstats compare`` and ``ddpstats nan-origin``."""
