"""The directory of a dump: names, entries, files; written and read, without torch but for the tensors."""
