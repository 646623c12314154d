"""autofa: the fastest attention kernel for every shape, measured once per machine."""
