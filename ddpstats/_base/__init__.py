"""The ground floor, which knows neither torch nor other ranks: settings, files, text, paths, caches, lazy imports."""
