"""The ground floor, which knows nothing of other ranks: settings, files, text, paths, caches, lazy imports, devices."""
