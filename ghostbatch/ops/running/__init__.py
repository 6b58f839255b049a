"""Running statistics: how the ghosts of a batch update them, on one rank or many."""
