"""One step of one rank, as it is recorded: calls, modules, backward passes and collectives."""
