"""One module per library: ``install()`` makes it use ddpstats, ``uninstall()`` undoes that."""
