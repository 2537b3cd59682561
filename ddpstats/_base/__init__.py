"""What knows neither torch nor the state of ranks: configuration, atomic files, bounded caches, names in messages."""
