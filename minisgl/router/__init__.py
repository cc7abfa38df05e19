"""Several engines behind one address: the parent process starts them, and routes requests."""
