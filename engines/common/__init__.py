"""Framework-free code that all learners share: phases, parts of a checkpoint, saving, restoring."""
