"""What `autofa doctor` finds out: what is here, what is wrong with it, and what to do."""
