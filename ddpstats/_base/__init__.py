"""The ground floor, which uses neither torch nor other ranks: settings, files, text, paths, caches, lazy imports."""
